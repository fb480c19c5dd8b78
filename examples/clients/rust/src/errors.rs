//! Error messages and exit codes of failed commands.

use std::fmt::Write;
use std::io;
use std::process::ExitCode;

use penstock_protos::common::v1::RequestError;
use tonic::Status;
use tonic_types::{ErrorDetail, StatusExt};

use crate::channel::name_of;

/// Reason for which a command failed.
#[derive(Debug)]
pub enum Failure {
    /// A call failed.
    Call(Box<Status>),
    /// Another error, whose message has not been printed yet.
    Told(String),
    /// An error whose message has already been printed.
    Known,
    /// The output cannot be written, for example because its reader has exited.
    Output(io::Error),
    Interrupted,
}

impl From<Status> for Failure {
    fn from(status: Status) -> Self {
        Self::Call(Box::new(status))
    }
}

impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Self {
        Self::Output(error)
    }
}

impl From<tonic::transport::Error> for Failure {
    fn from(error: tonic::transport::Error) -> Self {
        let cause = std::error::Error::source(&error).map(|cause| format!(": {cause}"));
        Self::Told(format!("{error}{}", cause.unwrap_or_default()))
    }
}

impl Failure {
    pub fn tell(&self) {
        match self {
            Self::Call(status) => eprint!("{}", describe(status)),
            Self::Told(message) => eprintln!("{message}"),
            Self::Output(error) if error.kind() != io::ErrorKind::BrokenPipe => eprintln!("standard output: {error}"),
            Self::Output(_) | Self::Known | Self::Interrupted => {}
        }
    }

    pub fn exit_code(&self) -> ExitCode {
        ExitCode::from(if matches!(self, Self::Interrupted) { 130 } else { 1 })
    }
}

/// Returns the code, the message and the `google.rpc` details of a failed call, as lines of text.
pub fn describe(status: &Status) -> String {
    let mut lines = format!("{}: {}\n", name_of(status.code()), status.message());
    for detail in status.get_error_details_vec() {
        match detail {
            ErrorDetail::ErrorInfo(info) => line(&mut lines, "reason", &info.reason),
            ErrorDetail::BadRequest(bad) => {
                for violation in bad.field_violations {
                    line(&mut lines, "field", &violation.field);
                }
            }
            ErrorDetail::RetryInfo(retry) => {
                if let Some(delay) = retry.retry_delay {
                    line(&mut lines, "retry after", &format!("{} s", delay.as_secs_f64()));
                }
            }
            _ => {}
        }
    }
    lines
}

/// Does the same for a failed request of a session. The other requests of the session continue.
pub fn describe_one(error: &RequestError) -> String {
    let mut lines = format!("{}: {}\n", error.code, error.message);
    line(&mut lines, "reason", &error.reason);
    if !error.field.is_empty() {
        line(&mut lines, "field", &error.field);
    }
    if let Some(seconds) = error.retry_after {
        line(&mut lines, "retry after", &format!("{seconds} s"));
    }
    lines
}

fn line(lines: &mut String, name: &str, value: &str) {
    writeln!(lines, "  {name}: {value}").expect("a String takes everything");
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tonic::Code;
    use tonic_types::ErrorDetails;

    use super::*;

    #[test]
    fn details_are_told_in_lines() {
        let mut details = ErrorDetails::with_error_info("QUEUE_FULL", "penstock", []);
        details.add_bad_request_violation("text", "is empty").set_retry_info(Some(Duration::from_millis(2500)));
        let status = Status::with_error_details(Code::ResourceExhausted, "the queue is full", details);
        let told = describe(&status);
        assert!(told.starts_with("RESOURCE_EXHAUSTED: the queue is full\n"));
        for line in ["  reason: QUEUE_FULL", "  field: text", "  retry after: 2.5 s"] {
            assert!(told.lines().any(|told| told == line), "{told}");
        }
        assert_eq!(describe(&Status::unavailable("refused")), "UNAVAILABLE: refused\n");
    }
}
