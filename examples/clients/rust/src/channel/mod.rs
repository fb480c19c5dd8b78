//! A channel to all addresses of a name, for the clients that tonic generates. Unlike tonic's own channel, it does the
//! same as gRPC's libraries: it resolves the name repeatedly, sends calls in turn to all healthy addresses, and retries
//! failed calls. A service config has the settings.

mod answer;
mod balance;
mod connection;
mod deadline;
mod health;
mod keeper;
mod replay;
mod resolver;
mod retry;
mod service_config;
#[cfg(test)]
mod tests;

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll};

use http::{HeaderValue, Request, Response};
use tokio::sync::{Notify, watch};
use tokio::task::JoinHandle;
use tokio::time::{sleep, timeout_at};
use tonic::body::Body;
use tonic::transport::Endpoint;
use tonic::{Code, Status};
use tower_service::Service;

pub use resolver::Target;
pub use service_config::{ServiceConfig, name_of};

use balance::{Addresses, Choice};
use connection::{Connection, Failure};
use deadline::Deadline;
use health::Dialer;
use keeper::Keeper;
use replay::Replay;
use retry::{Attempts, Throttle};

/// Channel for many concurrent calls. Clones share its connections, which end when the last clone is dropped.
#[derive(Clone)]
pub struct Channel(Arc<Shared>);

struct Shared {
    config: ServiceConfig,
    throttle: Throttle,
    addresses: watch::Receiver<Addresses<Connection>>,
    turn: AtomicUsize,
    following: JoinHandle<()>,
}

impl Drop for Shared {
    fn drop(&mut self) {
        self.following.abort();
    }
}

impl Channel {
    /// Starts to connect to all addresses of `target`. `endpoint` has the settings of the connections: TLS, keepalive.
    pub fn new(target: Target, endpoint: Endpoint, config: ServiceConfig) -> Self {
        Self::over(endpoint, config, |mut keeper| async move {
            let ended = keeper.dialer.ended.clone();
            resolver::follow(&target, &ended, |found| keeper.update(found)).await;
        })
    }

    /// Returns a channel to the addresses that `follow` passes to the keeper.
    fn over<F: Future<Output = ()> + Send + 'static>(
        endpoint: Endpoint,
        config: ServiceConfig,
        follow: impl FnOnce(Keeper) -> F,
    ) -> Self {
        let (sender, addresses) = watch::channel(Addresses::default());
        let service = config.health.as_ref().map(|health| health.service_name.clone());
        let dialer = Dialer { endpoint, service, ended: Arc::new(Notify::new()) };
        let following = tokio::spawn(follow(Keeper::new(dialer, sender)));
        let throttle = Throttle::new(config.throttling.clone());
        Self(Arc::new(Shared { config, throttle, addresses, turn: AtomicUsize::new(0), following }))
    }
}

impl Shared {
    /// Waits until a connection is ready, and returns the next connection in turn.
    async fn connection(&self) -> Result<Connection, Status> {
        let turn = self.turn.fetch_add(1, Ordering::Relaxed);
        let mut addresses = self.addresses.clone();
        loop {
            let choice = addresses.borrow_and_update().choose(turn);
            match choice {
                Choice::Take(connection) => return Ok(connection),
                Choice::Fail(why) => return Err(Status::unavailable(why)),
                Choice::Wait => addresses.changed().await.map_err(|_| Status::cancelled("the channel was closed"))?,
            }
        }
    }

    /// Makes attempts until one succeeds. An attempt succeeds when the headers of its response arrive, even if the body
    /// then fails.
    async fn call(&self, request: Request<Body>, deadline: Option<Deadline>) -> Result<Response<Body>, Status> {
        let (head, body) = request.into_parts();
        let body = Replay::new(body);
        let mut attempts = Attempts::new(self.config.retry_policy(head.uri.path()), &self.throttle);
        loop {
            let mut request = Request::from_parts(head.clone(), body.attempt());
            if let Some(deadline) = deadline {
                deadline.write(request.headers_mut());
            }
            if attempts.failed > 0 {
                request.headers_mut().insert("grpc-previous-rpc-attempts", HeaderValue::from(attempts.failed));
            }
            let answer = match self.connection().await {
                Ok(connection) => connection.call(request).await,
                Err(status) => Err(Failure::Failed(status)),
            };
            let answer = match answer {
                Err(Failure::NotSent(_)) if body.is_whole() => {
                    tokio::task::yield_now().await; // the owner of the connection removes it
                    continue;
                }
                Err(Failure::NotSent(status) | Failure::Failed(status)) => Err(status),
                Ok(response) => Ok(response),
            };
            let Some(wait) = attempts.again(code_of(&answer)).filter(|_| body.is_whole()) else {
                body.commit();
                return answer;
            };
            sleep(wait).await;
        }
    }
}

/// Returns the code with which an attempt ended. OK if a response has begun.
fn code_of(answer: &Result<Response<Body>, Status>) -> Code {
    match answer {
        Err(status) => status.code(),
        Ok(response) => match response.status().as_u16() {
            429 | 502..=504 => Code::Unavailable, // from a gateway
            _ => Status::from_header_map(response.headers()).map_or(Code::Ok, |status| status.code()),
        },
    }
}

impl Service<Request<Body>> for Channel {
    type Response = Response<Body>;
    type Error = Status;
    type Future = Pin<Box<dyn Future<Output = Result<Response<Body>, Status>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Status>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let shared = self.0.clone();
        Box::pin(async move {
            let deadline = Deadline::of(request.headers());
            let call = shared.call(request, deadline);
            let Some(limit) = deadline else { return Ok(answer::answer(call.await?, None)) };
            match timeout_at(limit.at, call).await {
                Ok(Ok(response)) => Ok(answer::answer(response, deadline)),
                Ok(Err(status)) if !limit.is_near() => Err(status),
                _ => Err(limit.status()),
            }
        })
    }
}
