//! The body of a request that may have to be sent again.

use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, ready};

use http_body::Frame;
use tonic::Status;
use tonic::body::Body;
use tonic::codegen::Bytes;

/// Maximum number of bytes of a request that are kept. A larger request is not retried.
const MOST_BYTES: usize = 1024 * 1024;

/// Keeps the sent bytes until a response has begun. Clones share the bytes.
pub struct Replay(Arc<Mutex<Sent>>);

struct Sent {
    rest: Body,
    ended: bool,
    kept: Vec<Bytes>,
    bytes: usize,
    keeps: bool,
    /// Number of the attempt that may continue to read.
    attempt: u32,
}

impl Replay {
    pub fn new(body: Body) -> Self {
        let sent = Sent { rest: body, ended: false, kept: Vec::new(), bytes: 0, keeps: true, attempt: 0 };
        Self(Arc::new(Mutex::new(sent)))
    }

    /// Returns the body from its beginning. The body of the previous attempt ends.
    pub fn attempt(&self) -> Body {
        let mut sent = self.0.lock().expect("no holder panics");
        sent.attempt += 1;
        Body::new(Attempt { sent: self.0.clone(), number: sent.attempt, position: 0 })
    }

    /// Returns whether the request can still be sent from its beginning.
    pub fn is_whole(&self) -> bool {
        self.0.lock().expect("no holder panics").keeps
    }

    /// Drops the kept bytes, because there will be no other attempt.
    pub fn commit(&self) {
        self.0.lock().expect("no holder panics").keeps = false;
    }
}

struct Attempt {
    sent: Arc<Mutex<Sent>>,
    number: u32,
    position: usize,
}

impl http_body::Body for Attempt {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        let sent = self.sent.clone();
        let mut sent = sent.lock().expect("no holder panics");
        if sent.attempt != self.number {
            return Poll::Ready(Some(Err(Status::cancelled("another attempt has begun"))));
        }
        if let Some(data) = sent.kept.get(self.position) {
            self.position += 1;
            return Poll::Ready(Some(Ok(Frame::data(data.clone()))));
        }
        if sent.ended {
            return Poll::Ready(None);
        }
        let frame = ready!(Pin::new(&mut sent.rest).poll_frame(context));
        match &frame {
            Some(Ok(frame)) => {
                if let Some(data) = frame.data_ref().filter(|_| sent.keeps) {
                    sent.bytes += data.len();
                    sent.keeps = sent.bytes <= MOST_BYTES;
                    sent.kept.push(data.clone());
                    self.position += 1;
                }
            }
            _ => sent.ended = true,
        }
        Poll::Ready(frame)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;
    use std::future::poll_fn;

    use http_body::Body as _;

    use super::*;

    struct Frames(VecDeque<Bytes>);

    impl http_body::Body for Frames {
        type Data = Bytes;
        type Error = Status;

        fn poll_frame(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
            Poll::Ready(self.0.pop_front().map(|data| Ok(Frame::data(data))))
        }
    }

    fn replay(frames: &[&'static str]) -> Replay {
        Replay::new(Body::new(Frames(frames.iter().copied().map(Bytes::from).collect())))
    }

    async fn next(body: &mut Body) -> Option<Result<Bytes, Status>> {
        let frame = poll_fn(|context| Pin::new(&mut *body).poll_frame(context)).await?;
        Some(frame.map(|frame| frame.into_data().expect("requests have no trailers")))
    }

    async fn rest(mut body: Body) -> Vec<Bytes> {
        let mut frames = Vec::new();
        while let Some(frame) = next(&mut body).await {
            frames.push(frame.unwrap());
        }
        frames
    }

    #[tokio::test]
    async fn every_attempt_sends_all_of_it() {
        let replay = replay(&["a", "b", "c"]);
        let mut first = replay.attempt();
        assert_eq!(next(&mut first).await.unwrap().unwrap(), "a");
        let mut second = replay.attempt();
        assert!(next(&mut first).await.unwrap().is_err());
        assert_eq!(next(&mut second).await.unwrap().unwrap(), "a");
        assert_eq!(next(&mut second).await.unwrap().unwrap(), "b");
        assert_eq!(rest(replay.attempt()).await, ["a", "b", "c"]);
        assert_eq!(rest(replay.attempt()).await, ["a", "b", "c"]);
        assert!(replay.is_whole());
    }

    #[tokio::test]
    async fn nothing_is_kept_once_an_answer_has_begun() {
        let replay = replay(&["a", "b", "c"]);
        let mut body = replay.attempt();
        assert_eq!(next(&mut body).await.unwrap().unwrap(), "a");
        replay.commit();
        assert_eq!(rest(body).await, ["b", "c"]);
        assert_eq!(replay.0.lock().unwrap().kept, ["a"]);
        assert!(!replay.is_whole());
    }

    #[tokio::test]
    async fn one_that_is_too_long_is_sent_once() {
        let long: &'static str = "x".repeat(MOST_BYTES).leak();
        let replay = replay(&[long, "b", "c"]);
        assert_eq!(rest(replay.attempt()).await.len(), 3);
        assert!(!replay.is_whole());
    }
}
