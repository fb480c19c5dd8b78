//! Parsing of the command line.

use std::path::PathBuf;
use std::time::Duration;

use clap::error::{ContextKind, ContextValue};
use clap::{Args, CommandFactory, Parser};
use penstock_protos::common::v1::SamplingParams;
use tonic::Request;

use crate::channel::Target;

/// Maximum timeout of a call. The header for the deadline has room for it.
const LONGEST: Duration = Duration::from_secs(1_000_000_000);

/// Calls a Penstock server
#[derive(Parser)]
#[command(name = "client")]
pub enum Command {
    /// Print the text that continues a prompt, as it arrives
    Generate(Generate),
    /// Print the answer to a message, as it arrives
    Chat(Chat),
    /// Continue all prompts over one stream, and print each text when it is complete
    Session(Session),
    /// Make many Generate calls over one channel, and count them
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
    /// System message of the conversation
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true)]
    pub system: Option<String>,
    pub message: String,
}

#[derive(Args)]
pub struct Session {
    #[command(flatten)]
    pub options: Options,
    /// Abort the first request after this number of its messages
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub abort_after: Option<u32>,
    #[arg(required = true, value_name = "PROMPT")]
    pub prompts: Vec<String>,
}

#[derive(Args)]
pub struct Load {
    #[command(flatten)]
    pub options: Options,
    /// Number of calls that run at the same time
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    pub at_once: u32,
    /// Total number of calls; by default the value of --at-once
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..), conflicts_with = "time")]
    pub calls: Option<u32>,
    /// Start new calls for this time, instead of a fixed number of calls
    #[arg(long = "for", value_name = "SECONDS", value_parser = seconds, allow_negative_numbers = true)]
    pub time: Option<Duration>,
    pub prompt: String,
}

/// Options of all commands. If a field is not set, the model's default applies.
#[derive(Args)]
pub struct Options {
    /// Address of the server; all addresses of the name are used in turn
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
    /// Name of the model; by default the served model
    #[arg(long, value_name = "NAME", default_value = "", hide_default_value = true)]
    pub model: String,
    /// Maximum number of output tokens
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    max_tokens: Option<u32>,
    /// Sampling temperature; 0: greedy
    #[arg(long, value_name = "T", value_parser = finite, allow_negative_numbers = true)]
    temperature: Option<f32>,
    /// Seed for sampling, which makes the output reproducible
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    seed: Option<i64>,
    /// Text that ends the output; the option can be repeated
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

    /// Returns a request with the message and the deadline of the call. The client adds the API key.
    pub fn request<T>(&self, message: T) -> Request<T> {
        let mut request = Request::new(message);
        if let Some(timeout) = self.timeout {
            request.set_timeout(timeout);
        }
        request
    }
}

/// Returns the parsed command line. Ends the process if the command line is wrong.
pub fn parse() -> Command {
    Command::try_parse().unwrap_or_else(|error| with_usage(error).exit())
}

/// Adds the usage to an error, because clap adds the usage only to some errors.
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
