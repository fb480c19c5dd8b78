//! Deadline of a call, including its retries and its complete response. tonic's own limit covers only the headers of a
//! response.

use std::time::Duration;

use http::{HeaderMap, HeaderValue};
use tokio::time::Instant;
use tonic::Status;

const HEADER: &str = "grpc-timeout";
/// The header has at most 8 digits.
const MOST: u128 = 99_999_999;
/// The server, or a timer of tonic, may end the call this much earlier.
const NEAR: Duration = Duration::from_millis(10);

/// The time of the deadline, and its distance from the start of the call.
#[derive(Clone, Copy, Debug)]
pub struct Deadline {
    pub at: Instant,
    timeout: Duration,
}

impl Deadline {
    /// Returns the deadline that the request set with `set_timeout`.
    pub fn of(headers: &HeaderMap) -> Option<Self> {
        let timeout = parse(headers.get(HEADER)?.to_str().ok()?)?;
        Some(Self { at: Instant::now().checked_add(timeout)?, timeout })
    }

    /// Writes the remaining time into the headers, for the server.
    pub fn write(&self, headers: &mut HeaderMap) {
        let left = format(self.at.saturating_duration_since(Instant::now()));
        headers.insert(HEADER, HeaderValue::try_from(left).expect("digits and a letter"));
    }

    /// Returns whether the deadline has passed, or is less than `NEAR` away.
    pub fn is_near(&self) -> bool {
        Instant::now() + NEAR >= self.at
    }

    pub fn status(&self) -> Status {
        Status::deadline_exceeded(format!("the deadline of {} s has passed", self.timeout.as_secs_f64()))
    }
}

fn parse(text: &str) -> Option<Duration> {
    let (number, unit) = text.split_at_checked(text.len().checked_sub(1)?)?;
    let number = number.parse().ok()?;
    Some(match unit {
        "H" => Duration::from_secs(number * 3600),
        "M" => Duration::from_secs(number * 60),
        "S" => Duration::from_secs(number),
        "m" => Duration::from_millis(number),
        "u" => Duration::from_micros(number),
        "n" => Duration::from_nanos(number),
        _ => return None,
    })
}

/// Returns the time, rounded up, in the smallest unit in which it has at most 8 digits.
fn format(left: Duration) -> String {
    let units = [("u", 1_000), ("m", 1_000_000), ("S", 1_000_000_000)];
    let fits = units.iter().map(|(unit, nanos)| (unit, left.as_nanos().div_ceil(*nanos)));
    let (unit, number) = fits.clone().find(|(_, number)| *number <= MOST).unwrap_or((&"S", MOST));
    format!("{number}{unit}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read() {
        for (seconds, text) in [
            (0.0, "0u"),
            (2.5, "2500000u"),
            (99.999_999, "99999999u"),
            (100.0, "100000m"),
            (1e6, "1000000S"),
            (1e9, "99999999S"),
        ] {
            let written = format(Duration::from_secs_f64(seconds));
            assert_eq!(written, text);
            let read = parse(&written).unwrap().as_secs_f64();
            assert!((read - seconds.min(99_999_999.0)).abs() < 1e-6);
        }
        assert_eq!(parse("2H"), Some(Duration::from_secs(7200)));
        for text in ["", "1", "s", "1s", "-1S", "1.5S", "渡"] {
            assert_eq!(parse(text), None, "{text}");
        }
    }

    #[test]
    fn the_server_is_told_what_is_left() {
        let mut headers = HeaderMap::new();
        headers.insert(HEADER, HeaderValue::from_static("2500m"));
        let deadline = Deadline::of(&headers).unwrap();
        assert!(!deadline.is_near());
        deadline.write(&mut headers);
        assert!(parse(headers[HEADER].to_str().unwrap()).unwrap() <= Duration::from_millis(2500));
        assert_eq!(deadline.status().message(), "the deadline of 2.5 s has passed");
        assert!(Deadline::of(&HeaderMap::new()).is_none());
    }
}
