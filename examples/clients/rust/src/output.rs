//! What goes to standard output, and SIGINT.

use std::future::Future;
use std::io;

use tokio::io::{AsyncWriteExt, stdout};
use tokio::signal::ctrl_c;

use crate::errors::Failure;

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
