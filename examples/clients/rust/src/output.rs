//! What goes to standard output, and SIGINT.

use std::future::Future;
use std::io;
use std::time::Duration;

use tokio::io::{AsyncWriteExt, stdout};
use tokio::signal::ctrl_c;
use tokio::time::timeout;

use crate::errors::Failure;

/// How long a reader who has stopped reading may hold up an end that has another reason.
const LAST_WRITE: Duration = Duration::from_secs(1);

/// Writes `text` now.
pub async fn print(text: &str) -> io::Result<()> {
    let mut out = stdout();
    out.write_all(text.as_bytes()).await?;
    out.flush().await
}

/// What `work` ends with, or that it was interrupted: then it is dropped, and its calls are cancelled.
pub async fn until_interrupted<T>(work: impl Future<Output = Result<T, Failure>>) -> Result<T, Failure> {
    tokio::select! {
        interrupted = ctrl_c() => Err(interrupted.map_or_else(Failure::Output, |()| Failure::Interrupted)),
        ended = work => ended,
    }
}

/// Ends the line that `work` prints, however it ends.
pub async fn on_a_line(work: impl Future<Output = Result<(), Failure>>) -> Result<(), Failure> {
    let ended = until_interrupted(work).await;
    match &ended {
        Ok(()) => print("\n").await?,
        Err(Failure::Output(_)) => {}
        Err(_) => drop(timeout(LAST_WRITE, print("\n")).await),
    }
    ended
}
