//! `client generate`.

use penstock_protos::inference::v1::GenerateRequest;
use penstock_protos::inference::v1::generate_request::Prompt;

use crate::command_line::{self, Options};
use crate::connect::Client;
use crate::errors::Failure;
use crate::output::{on_a_line, print};

/// Prints the text as it arrives, and then a line break, also after an error.
pub async fn run(client: Client, args: command_line::Generate) -> Result<(), Failure> {
    on_a_line(print_text(client, args)).await
}

async fn print_text(mut client: Client, args: command_line::Generate) -> Result<(), Failure> {
    let message = request(&args.options, args.prompt);
    let mut stream = client.generate(args.options.request(message)).await?.into_inner();
    while let Some(response) = stream.message().await? {
        print(&response.text).await?;
    }
    Ok(())
}

/// Returns the request for a prompt. For omitted fields, the model's default applies.
pub fn request(options: &Options, prompt: String) -> GenerateRequest {
    GenerateRequest {
        model: options.model.clone(),
        prompt: Some(Prompt::Text(prompt)),
        sampling_params: Some(options.sampling_params()),
        ..Default::default()
    }
}
