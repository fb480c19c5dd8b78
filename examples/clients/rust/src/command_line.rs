//! The command line.

use std::path::PathBuf;
use std::time::Duration;

use clap::error::{ContextKind, ContextValue};
use clap::{Args, CommandFactory, Parser};
use penstock_protos::common::v1::SamplingParams;
use tonic::Request;

use crate::channel::Target;

/// What a deadline's header has room for, and more than enough.
const LONGEST: Duration = Duration::from_secs(1_000_000_000);

/// Calls a Penstock server
#[derive(Parser)]
#[command(name = "client")]
pub enum Command {
    /// Print the text that continues a prompt, as it arrives
    Generate(Generate),
    /// Print the answer to a message, as it arrives
    Chat(Chat),
    /// Continue all prompts over one stream, and print each text when it is whole
    Session(Session),
    /// Make many calls of Generate over one channel, and count them
    Load(Load),
}

#[derive(Args)]
pub struct Generate {
    #[command(flatten)]
    pub options: Options,
    pub prompt: String,
}

#[derive(Args)]
pub struct Chat {
    #[command(flatten)]
    pub options: Options,
    /// What to tell the model first
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true)]
    pub system: Option<String>,
    pub message: String,
}

#[derive(Args)]
pub struct Session {
    #[command(flatten)]
    pub options: Options,
    /// End the first request by its id, after so many messages of it
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub abort_after: Option<u32>,
    #[arg(required = true, value_name = "PROMPT")]
    pub prompts: Vec<String>,
}

#[derive(Args)]
pub struct Load {
    #[command(flatten)]
    pub options: Options,
    /// Calls that run together
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    pub at_once: u32,
    /// Calls in all; by default as many as at once
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..), conflicts_with = "time")]
    pub calls: Option<u32>,
    /// Begin calls until then
    #[arg(long = "for", value_name = "SECONDS", value_parser = seconds, allow_negative_numbers = true)]
    pub time: Option<Duration>,
    pub prompt: String,
}

/// What all commands take. A field that is not given stays unset, and takes the model's default.
#[derive(Args)]
pub struct Options {
    /// Where the server is; all addresses of the name are used in turn
    #[arg(long, value_name = "HOST:PORT", default_value = "localhost:50051")]
    pub address: Target,
    /// Encrypt the connection
    #[arg(long)]
    pub tls: bool,
    /// The certificates to trust; with it, --tls is not needed
    #[arg(long, value_name = "FILE")]
    pub ca: Option<PathBuf>,
    /// Deadline of each call
    #[arg(long, value_name = "SECONDS", value_parser = seconds, allow_negative_numbers = true)]
    pub timeout: Option<Duration>,
    /// Name of the model; by default the one that is served
    #[arg(long, value_name = "NAME", default_value = "", hide_default_value = true)]
    pub model: String,
    /// Longest output in tokens
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    max_tokens: Option<u32>,
    /// 0 is greedy
    #[arg(long, value_name = "T", value_parser = finite, allow_negative_numbers = true)]
    temperature: Option<f32>,
    /// Makes the output reproducible
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    seed: Option<i64>,
    /// A string that ends the output; repeatable
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true)]
    stop: Vec<String>,
}

impl Command {
    pub fn options(&self) -> &Options {
        match self {
            Self::Generate(args) => &args.options,
            Self::Chat(args) => &args.options,
            Self::Session(args) => &args.options,
            Self::Load(args) => &args.options,
        }
    }
}

impl Options {
    pub fn sampling_params(&self) -> SamplingParams {
        SamplingParams {
            max_tokens: self.max_tokens,
            temperature: self.temperature,
            seed: self.seed,
            stop: self.stop.clone(),
            ..Default::default()
        }
    }

    /// The call's message, with its deadline. The API key comes with the client.
    pub fn request<T>(&self, message: T) -> Request<T> {
        let mut request = Request::new(message);
        if let Some(timeout) = self.timeout {
            request.set_timeout(timeout);
        }
        request
    }
}

/// What was typed. Ends the process where that is no command line.
pub fn parse() -> Command {
    Command::try_parse().unwrap_or_else(|error| with_usage(error).exit())
}

/// clap tells the usage of some errors only.
fn with_usage(mut error: clap::Error) -> clap::Error {
    if error.use_stderr() && error.get(ContextKind::Usage).is_none() {
        let mut command = Command::command();
        let named = std::env::args().nth(1).unwrap_or_default();
        command.build();
        let usage = command.find_subcommand_mut(&named).map(clap::Command::render_usage);
        let usage = usage.unwrap_or_else(|| command.render_usage());
        error.insert(ContextKind::Usage, ContextValue::StyledStr(usage));
    }
    error
}

fn seconds(text: &str) -> Result<Duration, String> {
    let time = text.parse().ok().and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
    let fits = |time: &Duration| (Duration::from_nanos(1)..=LONGEST).contains(time);
    time.filter(fits).ok_or_else(|| format!("it must be a number of seconds above 0, {} at most", LONGEST.as_secs()))
}

fn finite(text: &str) -> Result<f32, String> {
    text.parse().ok().filter(|number: &f32| number.is_finite()).ok_or_else(|| "it must be a number".into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_definition_holds() {
        Command::command().debug_assert();
    }

    fn options(flags: &[&str]) -> Result<Options, String> {
        let words = ["client", "generate"].iter().chain(flags).chain(&["hello"]);
        match Command::try_parse_from(words) {
            Ok(Command::Generate(args)) => Ok(args.options),
            Ok(_) => unreachable!("generate was asked for"),
            Err(error) => Err(with_usage(error).to_string()),
        }
    }

    #[test]
    fn what_is_not_given_stays_unset() {
        let unset = options(&[]).unwrap_or_else(|error| panic!("{error}"));
        assert_eq!(unset.sampling_params(), SamplingParams::default());
        let flags = ["--seed", "-9223372036854775808", "--temperature", "0", "--stop", "-a", "--stop", "b"];
        let given = options(&flags).unwrap_or_else(|error| panic!("{error}")).sampling_params();
        assert_eq!((given.seed, given.temperature), (Some(i64::MIN), Some(0.0)));
        assert_eq!(given.stop, ["-a", "b"]);
    }

    #[test]
    fn a_number_that_is_none_is_named_with_its_flag() {
        for (flag, value) in [
            ("--max-tokens", "-1"),
            ("--max-tokens", "many"),
            ("--seed", "9223372036854775808"),
            ("--temperature", "nan"),
            ("--timeout", "0"),
            ("--timeout", "-2"),
            ("--timeout", "1e99"),
            ("--address", "localhost"),
        ] {
            let error = options(&[flag, value]).err().expect("no such value");
            assert!(error.contains(flag) && error.contains(value) && error.contains("Usage"), "{error}");
        }
    }
}
