//! Calls a Penstock server: continues prompts, answers messages, and makes many calls at once.
#![deny(warnings)]

mod channel;
mod chat;
mod command_line;
mod connect;
mod errors;
mod generate;
mod load;
mod output;
mod session;

use std::process::ExitCode;

use command_line::Command;
use errors::Failure;

fn main() -> ExitCode {
    let command = command_line::parse();
    let runtime = tokio::runtime::Runtime::new().expect("threads can be started");
    let ended = runtime.block_on(run(command));
    runtime.shutdown_background(); // a reader of the output that has stopped reading must not block the program
    match ended {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            failure.tell();
            failure.exit_code()
        }
    }
}

async fn run(command: Command) -> Result<(), Failure> {
    let client = connect::connect(command.options())?;
    match command {
        Command::Generate(args) => generate::run(client, args).await,
        Command::Chat(args) => chat::run(client, args).await,
        Command::Session(args) => session::run(client, args).await,
        Command::Load(args) => load::run(client, args).await,
    }
}
