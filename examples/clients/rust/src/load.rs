//! `client load`.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Instant;

use penstock_protos::inference::v1::GenerateRequest;
use tokio::task::JoinSet;
use tonic::Status;

use crate::command_line;
use crate::connect::Client;
use crate::errors::{Failure, describe};
use crate::generate::request;
use crate::output::{print, until_interrupted};

/// Makes the calls, and prints their number.
pub async fn run(client: Client, args: command_line::Load) -> Result<(), Failure> {
    let message = request(&args.options, args.prompt.clone());
    let load = Arc::new(Load { client, message, start: Instant::now(), args, counts: Counts::default() });
    let mut workers = JoinSet::new();
    for _ in 0..load.args.at_once {
        workers.spawn(load.clone().work());
    }
    let ended = until_interrupted(async { Ok(workers.join_all().await) }).await;
    let Counts { calls, failed, messages, .. } = &load.counts;
    let seconds = load.start.elapsed().as_secs_f64();
    print(&format!("calls: {calls:?}, failed: {failed:?}, messages: {messages:?}, seconds: {seconds:.1}\n")).await?;
    ended?;
    if failed.load(Relaxed) > 0 { Err(Failure::Known) } else { Ok(()) }
}

struct Load {
    client: Client,
    message: GenerateRequest,
    start: Instant,
    args: command_line::Load,
    counts: Counts,
}

#[derive(Default)]
struct Counts {
    begun: AtomicU64,
    /// Number of calls that have ended.
    calls: AtomicU64,
    failed: AtomicU64,
    messages: AtomicU64,
}

impl Load {
    /// Makes one call after the other.
    async fn work(self: Arc<Self>) {
        while self.is_more() {
            if let Err(status) = self.call().await {
                eprint!("{}", describe(&status));
                self.counts.failed.fetch_add(1, Relaxed);
            }
            self.counts.calls.fetch_add(1, Relaxed);
        }
    }

    fn is_more(&self) -> bool {
        let begun = self.counts.begun.fetch_add(1, Relaxed);
        match self.args.time {
            Some(time) => self.start.elapsed() < time,
            None => begun < self.args.calls.unwrap_or(self.args.at_once).into(),
        }
    }

    async fn call(&self) -> Result<(), Status> {
        let request = self.args.options.request(self.message.clone());
        let mut stream = self.client.clone().generate(request).await?.into_inner();
        while stream.message().await?.is_some() {
            self.counts.messages.fetch_add(1, Relaxed);
        }
        Ok(())
    }
}
