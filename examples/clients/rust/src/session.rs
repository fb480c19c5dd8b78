//! `client session`.

use std::collections::HashMap;

use penstock_protos::common::v1::FinishReason;
use penstock_protos::inference::v1::generate_session_request::Message as Asked;
use penstock_protos::inference::v1::generate_session_response::Message as Answered;
use penstock_protos::inference::v1::{GenerateRequest, GenerateResponse, GenerateSessionRequest};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tokio_stream::{StreamExt, iter};

use crate::command_line;
use crate::connect::Client;
use crate::errors::{Failure, describe_one};
use crate::generate::request;
use crate::output::{print, until_interrupted};

/// Id of the request that `--abort-after` aborts.
const FIRST: &str = "0";

/// Prints the text of each request when it is complete.
pub async fn run(client: Client, args: command_line::Session) -> Result<(), Failure> {
    until_interrupted(print_texts(client, args)).await
}

async fn print_texts(mut client: Client, args: command_line::Session) -> Result<(), Failure> {
    let (send, abort) = mpsc::channel(1);
    // Dropping the sender half-closes the stream, immediately if no request must be aborted.
    let first = args.abort_after.map(|left| First { left, send });
    let mut session = Session { texts: HashMap::new(), failed: false, first };
    let requests: Vec<_> = args
        .prompts
        .into_iter()
        .enumerate()
        .map(|(number, prompt)| GenerateRequest { request_id: number.to_string(), ..request(&args.options, prompt) })
        .collect();
    let asked = iter(requests).map(Asked::Generate).chain(ReceiverStream::new(abort));
    let messages = asked.map(|message| GenerateSessionRequest { message: Some(message) });
    let call = args.options.request(messages);
    let mut stream = client.generate_session(call).await?.into_inner();
    while let Some(response) = stream.message().await? {
        match response.message {
            Some(Answered::Output(output)) => session.take(output).await?,
            Some(Answered::Error(failed)) => {
                eprint!("[{}] {}", failed.request_id, describe_one(&failed.error.unwrap_or_default()));
                session.failed = true;
                session.count(&failed.request_id, true);
            }
            None => {}
        }
    }
    if session.failed { Err(Failure::Known) } else { Ok(()) }
}

/// Outputs of the requests so far.
struct Session {
    texts: HashMap<String, String>,
    failed: bool,
    first: Option<First>,
}

/// Data for aborting the first request, until it is aborted or has ended.
struct First {
    left: u32,
    send: mpsc::Sender<Asked>,
}

impl Session {
    async fn take(&mut self, output: GenerateResponse) -> Result<(), Failure> {
        let reason = output.finish_reason();
        let id = output.request_id;
        self.texts.entry(id.clone()).or_default().push_str(&output.text);
        let ended = reason != FinishReason::Unspecified;
        if ended {
            let text = self.texts.remove(&id).unwrap_or_default();
            let aborted = if reason == FinishReason::Abort { " (aborted)" } else { "" };
            print(&format!("[{id}] {text}{aborted}\n")).await?;
        }
        self.count(&id, ended);
        Ok(())
    }

    /// Aborts the first request when enough of its messages have arrived, unless the request has already ended.
    fn count(&mut self, id: &str, ended: bool) {
        let Some(first) = self.first.as_mut().filter(|_| id == FIRST) else { return };
        first.left -= 1;
        if ended {
            self.first = None;
        } else if first.left == 0 {
            // If there is no receiver, the call has ended.
            let _ = first.send.try_send(Asked::AbortRequestId(FIRST.into()));
            self.first = None;
        }
    }
}
