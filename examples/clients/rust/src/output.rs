//! Standard output, and handling of SIGINT.

use std::future::Future;
use std::io;
use std::time::Duration;

use tokio::io::{AsyncWriteExt, stdout};
use tokio::signal::ctrl_c;
use tokio::time::timeout;

use crate::errors::Failure;

/// Maximum time that the program waits for a reader of the output before it exits.
const LAST_WRITE: Duration = Duration::from_secs(1);

/// Writes `text`, and flushes the output.
pub async fn print(text: &str) -> io::Result<()> {
    let mut out = stdout();
    out.write_all(text.as_bytes()).await?;
    out.flush().await
}

/// Returns the result of `work`. After SIGINT, drops `work`, which cancels its calls, and returns `Interrupted`.
pub async fn until_interrupted<T>(work: impl Future<Output = Result<T, Failure>>) -> Result<T, Failure> {
    tokio::select! {
        interrupted = ctrl_c() => Err(interrupted.map_or_else(Failure::Output, |()| Failure::Interrupted)),
        ended = work => ended,
    }
}

/// Runs `work`, and then prints a line break, also after an error.
pub async fn on_a_line(work: impl Future<Output = Result<(), Failure>>) -> Result<(), Failure> {
    let ended = until_interrupted(work).await;
    match &ended {
        Ok(()) => print("\n").await?,
        Err(Failure::Output(_)) => {}
        Err(_) => drop(timeout(LAST_WRITE, print("\n")).await),
    }
    ended
}
