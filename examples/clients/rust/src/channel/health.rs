//! Connection to one address, which is opened again whenever it ends, and health checks of the server (gRFC A17).

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::{Instant, sleep_until};
use tonic::transport::Endpoint;
use tonic::{Code, Status, Streaming};
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_client::HealthClient;
use tonic_health::pb::{HealthCheckRequest, HealthCheckResponse};

use super::balance::State;
use super::connection::Connection;

/// Time between the starts of two connection attempts, with the same backoff as in gRPC's own clients.
const FIRST_WAIT: Duration = Duration::from_secs(1);
const LONGEST_WAIT: Duration = Duration::from_secs(120);
const WAIT_FACTOR: f64 = 1.6;
const SHORTEST_WAIT: Duration = Duration::from_millis(100);

/// Opens connections to addresses, all with the same settings.
#[derive(Clone)]
pub struct Dialer {
    pub endpoint: Endpoint,
    /// Name of the service whose health is watched, if any.
    pub service: Option<String>,
    /// Notified when a connection has ended or failed, because the name may have other addresses now.
    pub ended: Arc<Notify>,
}

impl Dialer {
    /// Keeps a connection to `address` open, and reports its state with `tell`. Never ends.
    pub async fn keep(self, address: SocketAddr, tell: impl Fn(State<Connection>)) {
        let mut wait = FIRST_WAIT;
        loop {
            let begun = Instant::now();
            let failed = match Connection::open(&self.endpoint, address).await {
                Ok(connection) => self.watch(address, &connection, &tell).await.err(),
                Err(why) => Some(why),
            };
            self.ended.notify_one();
            if let Some(why) = failed {
                tell(State::Failed(why));
                sleep_until(begun + wait.mul_f64(0.8 + 0.4 * fastrand::f64())).await;
                wait = wait.mul_f64(WAIT_FACTOR).min(LONGEST_WAIT);
            } else {
                tell(State::Connecting);
                sleep_until(begun + SHORTEST_WAIT).await;
                wait = FIRST_WAIT;
            }
        }
    }

    /// Watches the health until the connection ends. Returns an error if the server has not reported its health until
    /// then.
    async fn watch(
        &self,
        address: SocketAddr,
        connection: &Connection,
        tell: &impl Fn(State<Connection>),
    ) -> Result<(), String> {
        let Some(service) = &self.service else {
            tell(State::Ready(connection.clone()));
            connection.lost().await;
            return Ok(());
        };
        let mut known = false;
        let mut watching = async || {
            let mut stream = open(connection, service).await?;
            while let Some(health) = stream.message().await? {
                known = true;
                tell(match health.status() {
                    ServingStatus::Serving => State::Ready(connection.clone()),
                    status => State::Failed(format!("{address}: its health is {}", status.as_str_name())),
                });
            }
            Ok(())
        };
        let ended = tokio::select! { ended = watching() => ended, () = connection.lost() => Ok(()) };
        match ended {
            // A server without a health service counts as healthy.
            Err(status) if Status::code(&status) == Code::Unimplemented => {
                tell(State::Ready(connection.clone()));
                connection.lost().await;
                Ok(())
            }
            Err(_) if known => Ok(()),
            ended => ended.map_err(|status| format!("{address}: no health: {}", status.message())),
        }
    }
}

async fn open(connection: &Connection, service: &str) -> Result<Streaming<HealthCheckResponse>, Status> {
    let request = HealthCheckRequest { service: service.to_owned() };
    Ok(HealthClient::new(connection.channel.clone()).watch(request).await?.into_inner())
}
