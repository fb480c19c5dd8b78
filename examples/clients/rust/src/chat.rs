//! `client chat`.

use penstock_protos::inference::v1::{ChatMessage, ChatRequest};

use crate::command_line;
use crate::connect::Client;
use crate::errors::Failure;
use crate::output::{on_a_line, print};

/// Prints the answer as it arrives, and then a line break, also after an error.
pub async fn run(client: Client, args: command_line::Chat) -> Result<(), Failure> {
    on_a_line(print_answer(client, args)).await
}

async fn print_answer(mut client: Client, args: command_line::Chat) -> Result<(), Failure> {
    let turn = |role: &str, content: String| ChatMessage { role: role.into(), content, ..Default::default() };
    let system = args.system.map(|text| turn("system", text));
    let message = ChatRequest {
        model: args.options.model.clone(),
        messages: system.into_iter().chain([turn("user", args.message)]).collect(),
        sampling_params: Some(args.options.sampling_params()),
        ..Default::default()
    };
    let mut stream = client.chat(args.options.request(message)).await?.into_inner();
    while let Some(response) = stream.message().await? {
        print(&response.content).await?;
    }
    Ok(())
}
