//! One connection to one address, which reports when it has ended.

use std::error::Error;
use std::future::{Future, poll_fn};
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};

use http::{Request, Response, Uri};
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;
use tokio::sync::Notify;
use tonic::body::Body;
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Status};
use tower_service::Service;

/// Connection for many concurrent calls.
#[derive(Clone)]
pub struct Connection {
    pub channel: Channel,
    lost: Arc<Notify>,
}

/// Reason why a call has no response.
#[derive(Debug)]
pub enum Failure {
    /// The connection had already ended, so the server has not received the call.
    NotSent(Status),
    Failed(Status),
}

impl Connection {
    /// Connects to `address`. `endpoint` has the name of the server, which TLS checks, and the options.
    pub async fn open(endpoint: &Endpoint, address: SocketAddr) -> Result<Self, String> {
        let connector = Once { address, connected: Arc::new(AtomicBool::new(false)) };
        let channel = endpoint.connect_with_connector(connector).await;
        let channel = channel.map_err(|error| format!("{address}: {}", told(&error)))?;
        Ok(Self { channel, lost: Arc::new(Notify::new()) })
    }

    /// Returns the headers of the response. Errors of the response's body must also be passed to [`status_of`].
    pub async fn call(&self, request: Request<Body>) -> Result<Response<Body>, Failure> {
        let mut channel = self.channel.clone();
        let answer = match poll_fn(|context| channel.poll_ready(context)).await {
            Ok(()) => channel.call(request).await,
            Err(error) => Err(error),
        };
        answer.map_err(|error| {
            let status = status_of(&error);
            if status.code() == Code::Unavailable {
                self.lost.notify_one();
            }
            if was_sent(&error) { Failure::Failed(status) } else { Failure::NotSent(status) }
        })
    }

    /// Waits until a call has found that the connection has ended.
    pub async fn lost(&self) {
        self.lost.notified().await;
    }
}

/// Connects only once. tonic would reconnect without a notification; this connector reports that the connection ended.
#[derive(Clone)]
struct Once {
    address: SocketAddr,
    connected: Arc<AtomicBool>,
}

#[derive(Debug)]
struct Ended;

impl std::fmt::Display for Ended {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("the connection has ended")
    }
}

impl Error for Ended {}

impl Service<Uri> for Once {
    type Response = TokioIo<TcpStream>;
    type Error = Box<dyn Error + Send + Sync>;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Self::Error>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: Uri) -> Self::Future {
        let Once { address, connected } = self.clone();
        Box::pin(async move {
            if connected.swap(true, Ordering::Relaxed) {
                return Err(Ended.into());
            }
            let stream = TcpStream::connect(address).await?;
            stream.set_nodelay(true)?;
            Ok(TokioIo::new(stream))
        })
    }
}

/// Returns the status of a call that the transport ended. tonic returns UNKNOWN for most of these calls.
pub fn status_of(error: &(dyn Error + 'static)) -> Status {
    let reset = sources(error).find_map(|error| error.downcast_ref::<h2::Error>()).filter(|error| error.is_reset());
    let code = match reset.and_then(h2::Error::reason) {
        None | Some(h2::Reason::REFUSED_STREAM) => Code::Unavailable,
        Some(h2::Reason::CANCEL) => Code::Cancelled,
        Some(h2::Reason::ENHANCE_YOUR_CALM) => Code::ResourceExhausted,
        Some(h2::Reason::INADEQUATE_SECURITY) => Code::PermissionDenied,
        Some(_) => Code::Internal,
    };
    Status::new(code, told(error))
}

/// Returns false if it is certain that the server has not received the call.
fn was_sent(error: &(dyn Error + 'static)) -> bool {
    !sources(error)
        .any(|error| error.is::<Ended>() || error.downcast_ref::<hyper::Error>().is_some_and(hyper::Error::is_canceled))
}

fn sources<'a>(error: &'a (dyn Error + 'static)) -> impl Iterator<Item = &'a (dyn Error + 'static)> {
    std::iter::successors(Some(error), |error: &&'a (dyn Error + 'static)| (*error).source())
}

/// Returns the messages of an error and of its causes.
fn told(error: &(dyn Error + 'static)) -> String {
    let mut parts: Vec<String> = Vec::new();
    for part in sources(error).map(ToString::to_string) {
        if !parts.iter().any(|known| known.contains(&part)) {
            parts.push(part);
        }
    }
    parts.join(": ")
}
