//! Body of a response. Its errors have gRPC's codes, and it ends at the deadline.

use std::error::Error;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};

use http::{Response, StatusCode};
use http_body::Frame;
use tokio::time::{Sleep, sleep_until};
use tonic::Status;
use tonic::body::Body;
use tonic::codegen::Bytes;

use super::connection::status_of;
use super::deadline::Deadline;

struct Answer {
    body: Body,
    /// Whether a status has arrived, or will not arrive.
    told: bool,
    deadline: Option<(Deadline, Pin<Box<Sleep>>)>,
}

/// Returns the response with a body that ends at the deadline, and whose errors have gRPC's codes.
pub fn answer(response: Response<Body>, deadline: Option<Deadline>) -> Response<Body> {
    let told = response.status() != StatusCode::OK || response.headers().contains_key(Status::GRPC_STATUS);
    let deadline = deadline.map(|deadline| (deadline, Box::pin(sleep_until(deadline.at))));
    response.map(|body| Body::new(Answer { body, told, deadline }))
}

impl Answer {
    /// Returns the status that the end of the stream means.
    fn failure(&self, error: Option<Status>) -> Status {
        match (&self.deadline, error) {
            (Some((deadline, _)), _) if deadline.is_near() => deadline.status(),
            (_, Some(status)) if status.source().is_none() => status,
            (_, Some(status)) => status_of(&status),
            // hyper reports RST_STREAM with CANCEL as a normal end.
            (_, None) => Status::cancelled("the server has ended the stream without a status"),
        }
    }
}

impl http_body::Body for Answer {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        match Pin::new(&mut self.body).poll_frame(context) {
            Poll::Ready(Some(Ok(frame))) => {
                self.told |= frame.is_trailers();
                return Poll::Ready(Some(Ok(frame)));
            }
            Poll::Ready(None) if self.told => return Poll::Ready(None),
            Poll::Ready(None) => {
                self.told = true;
                return Poll::Ready(Some(Err(self.failure(None))));
            }
            Poll::Ready(Some(Err(status))) => {
                self.told = true;
                return Poll::Ready(Some(Err(self.failure(Some(status)))));
            }
            Poll::Pending => {}
        }
        let Some((deadline, sleep)) = &mut self.deadline else { return Poll::Pending };
        if sleep.as_mut().poll(context).is_pending() {
            return Poll::Pending;
        }
        let status = deadline.status();
        (self.body, self.told, self.deadline) = (Body::empty(), true, None); // the server is notified
        Poll::Ready(Some(Err(status)))
    }
}
