//! Retries of failed calls (gRFC A6).

use std::sync::Mutex;
use std::time::Duration;

use tonic::Code;

use super::service_config::{RetryPolicy, Throttling};

/// Maximum number of attempts, even if a policy allows more.
const MOST_ATTEMPTS: u32 = 5;

/// The attempts of one call.
pub struct Attempts<'a> {
    policy: Option<&'a RetryPolicy>,
    throttle: &'a Throttle,
    /// Number of failed attempts.
    pub failed: u32,
}

impl<'a> Attempts<'a> {
    pub fn new(policy: Option<&'a RetryPolicy>, throttle: &'a Throttle) -> Self {
        Self { policy, throttle, failed: 0 }
    }

    /// Returns the time to wait before the next attempt, after an attempt that ended with `code` before a response
    /// began. Returns None if there must be no further attempt.
    pub fn again(&mut self, code: Code) -> Option<Duration> {
        if code == Code::Ok {
            self.throttle.succeeded();
        }
        let policy = self.policy.filter(|policy| policy.retryable_status_codes.contains(&code))?;
        let allowed = self.throttle.failed();
        self.failed += 1;
        (allowed && self.failed < policy.max_attempts.min(MOST_ATTEMPTS)).then(|| backoff(policy, self.failed))
    }
}

fn backoff(policy: &RetryPolicy, failed: u32) -> Duration {
    let factor = policy.backoff_multiplier.powf(f64::from(failed - 1));
    let whole = policy.initial_backoff.as_secs_f64() * factor;
    // Calls that failed at the same time must not be retried at the same time.
    Duration::from_secs_f64(whole.min(policy.max_backoff.as_secs_f64()) * (0.8 + 0.4 * fastrand::f64()))
}

/// Prevents retries while too many calls of a channel fail.
pub struct Throttle {
    limits: Option<Throttling>,
    tokens: Mutex<f64>,
}

impl Throttle {
    pub fn new(limits: Option<Throttling>) -> Self {
        let tokens = Mutex::new(limits.as_ref().map_or(0.0, |limits| limits.max_tokens));
        Self { limits, tokens }
    }

    fn succeeded(&self) {
        if let Some(limits) = &self.limits {
            let mut tokens = self.tokens.lock().expect("no holder panics");
            *tokens = (*tokens + limits.token_ratio).min(limits.max_tokens);
        }
    }

    /// Counts a failure. Returns whether a retry is allowed.
    fn failed(&self) -> bool {
        let Some(limits) = &self.limits else { return true };
        let mut tokens = self.tokens.lock().expect("no holder panics");
        *tokens = (*tokens - 1.0).max(0.0);
        *tokens > limits.max_tokens / 2.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn policy() -> RetryPolicy {
        RetryPolicy {
            max_attempts: 4,
            initial_backoff: Duration::from_millis(100),
            max_backoff: Duration::from_millis(300),
            backoff_multiplier: 2.0,
            retryable_status_codes: vec![Code::Unavailable],
        }
    }

    #[test]
    fn there_are_as_many_attempts_as_the_policy_says_each_a_longer_time_after_the_last() {
        let (policy, throttle) = (policy(), Throttle::new(None));
        let mut attempts = Attempts::new(Some(&policy), &throttle);
        for whole in [100.0, 200.0, 300.0] {
            let wait = attempts.again(Code::Unavailable).unwrap().as_secs_f64() * 1000.0;
            assert!((whole * 0.8..=whole * 1.2).contains(&wait), "{wait} ms, not about {whole} ms");
        }
        assert_eq!(attempts.again(Code::Unavailable), None);
    }

    #[test]
    fn other_codes_and_other_methods_are_not_tried_again() {
        let (policy, throttle) = (policy(), Throttle::new(None));
        assert_eq!(Attempts::new(Some(&policy), &throttle).again(Code::Internal), None);
        assert_eq!(Attempts::new(None, &throttle).again(Code::Unavailable), None);
    }

    #[test]
    fn nothing_is_tried_again_while_half_of_the_tokens_are_gone() {
        let policy = policy();
        let throttle = Throttle::new(Some(Throttling { max_tokens: 4.0, token_ratio: 0.5 }));
        let fails = || Attempts::new(Some(&policy), &throttle).again(Code::Unavailable);
        assert!(fails().is_some()); // 3 are left
        assert!(fails().is_none()); // 2
        for _ in 0..4 {
            assert!(Attempts::new(Some(&policy), &throttle).again(Code::Ok).is_none()); // 4
        }
        assert!(fails().is_some());
    }
}
