//! The parts of a gRPC service config that this channel supports. All other parts are ignored.

use std::collections::HashMap;
use std::time::Duration;

use serde::{Deserialize, Deserializer, de};
use tonic::Code;

/// Contents of a service config.
#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ServiceConfig {
    load_balancing_config: Vec<HashMap<String, serde_json::Value>>,
    #[serde(default, rename = "healthCheckConfig")]
    pub health: Option<HealthCheck>,
    #[serde(default, rename = "methodConfig")]
    methods: Vec<MethodConfig>,
    #[serde(default, rename = "retryThrottling")]
    pub throttling: Option<Throttling>,
}

/// Name of the service whose health is watched.
#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct HealthCheck {
    pub service_name: String,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct MethodConfig {
    name: Vec<MethodName>,
    retry_policy: Option<RetryPolicy>,
}

#[derive(Clone, Debug, Deserialize)]
struct MethodName {
    #[serde(default)]
    service: String,
    #[serde(default)]
    method: String,
}

/// Which failed calls are retried, and how often.
#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct RetryPolicy {
    pub max_attempts: u32,
    #[serde(deserialize_with = "duration")]
    pub initial_backoff: Duration,
    #[serde(deserialize_with = "duration")]
    pub max_backoff: Duration,
    pub backoff_multiplier: f64,
    #[serde(deserialize_with = "codes")]
    pub retryable_status_codes: Vec<Code>,
}

/// Limit on the retries of all calls of a channel.
#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Throttling {
    pub max_tokens: f64,
    pub token_ratio: f64,
}

impl ServiceConfig {
    /// Parses JSON. Fails if a part is missing or invalid, or if the load balancing policy is not round robin.
    pub fn parse(json: &str) -> Result<Self, serde_json::Error> {
        let config: Self = serde_json::from_str(json)?;
        let policies = || config.load_balancing_config.iter().flat_map(HashMap::keys);
        if !policies().any(|name| name == "round_robin") {
            let names: Vec<_> = policies().collect();
            let message = format!("loadBalancingConfig is {names:?}; this channel knows round_robin only");
            return Err(de::Error::custom(message));
        }
        Ok(config)
    }

    /// Returns the policy for `path` (`/service/method`): the method's policy, or the service's policy, or the default
    /// policy.
    pub fn retry_policy(&self, path: &str) -> Option<&RetryPolicy> {
        let (service, method) = path.trim_start_matches('/').split_once('/')?;
        [(service, method), (service, ""), ("", "")]
            .iter()
            .find_map(|&wanted| {
                let named = |name: &MethodName| (name.service.as_str(), name.method.as_str()) == wanted;
                self.methods.iter().find(|config| config.name.iter().any(named))
            })?
            .retry_policy
            .as_ref()
    }
}

/// Returns the name of a code in gRPC's form, such as `INVALID_ARGUMENT`.
pub fn name_of(code: Code) -> String {
    let mut name = String::new();
    for letter in format!("{code:?}").chars() {
        if letter.is_uppercase() && !name.is_empty() {
            name.push('_');
        }
        name.extend(letter.to_uppercase());
    }
    name
}

fn codes<'de, D: Deserializer<'de>>(input: D) -> Result<Vec<Code>, D::Error> {
    let known = |name: &String| {
        let code = (0..=16).map(Code::from_i32).find(|code| name_of(*code) == *name);
        code.ok_or_else(|| de::Error::custom(format!("retryableStatusCodes has {name:?}, which is no code")))
    };
    Vec::<String>::deserialize(input)?.iter().map(known).collect()
}

fn duration<'de, D: Deserializer<'de>>(input: D) -> Result<Duration, D::Error> {
    let text = String::deserialize(input)?;
    let seconds = text.strip_suffix('s').and_then(|number| number.parse().ok());
    let known = seconds.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
    known.ok_or_else(|| de::Error::custom(format!("{text:?} is no duration such as \"0.1s\"")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn that_of_the_package_is_followed() {
        let config = ServiceConfig::parse(penstock_protos::SERVICE_CONFIG).unwrap();
        let policy = config.retry_policy("/penstock.inference.v1.InferenceService/Generate").unwrap();
        assert_eq!(policy.retryable_status_codes, [Code::Unavailable]);
        assert!(policy.max_attempts > 1 && policy.initial_backoff <= policy.max_backoff);
        assert!(config.health.is_some() && config.throttling.is_some());
        assert!(config.retry_policy("/grpc.health.v1.Health/Check").is_none());
    }

    #[test]
    fn a_method_goes_before_its_service_and_a_service_before_all() {
        let policy = |codes: &str| {
            format!(
                r#"{{"maxAttempts": 2, "initialBackoff": "1s", "maxBackoff": "1.5s", "backoffMultiplier": 2,
                     "retryableStatusCodes": ["{codes}"]}}"#
            )
        };
        let json = format!(
            r#"{{"loadBalancingConfig": [{{"other": {{}}}}, {{"round_robin": {{}}}}], "methodConfig": [
                {{"name": [{{}}], "retryPolicy": {}}},
                {{"name": [{{"service": "a.S"}}], "retryPolicy": {}}},
                {{"name": [{{"service": "a.S", "method": "M"}}]}}]}}"#,
            policy("ABORTED"),
            policy("OUT_OF_RANGE"),
        );
        let config = ServiceConfig::parse(&json).unwrap();
        let codes = |path| config.retry_policy(path).map(|policy| policy.retryable_status_codes.clone());
        assert_eq!(codes("/b.S/M"), Some(vec![Code::Aborted]));
        assert_eq!(codes("/a.S/N"), Some(vec![Code::OutOfRange]));
        assert_eq!(codes("/a.S/M"), None);
    }

    #[test]
    fn what_is_wrong_is_named() {
        let error = |json: &str| ServiceConfig::parse(json).unwrap_err().to_string();
        assert!(error(r#"{"loadBalancingConfig": [{"pick_first": {}}]}"#).contains("pick_first"));
        let policy = |backoff: &str, code: &str| {
            error(&format!(
                r#"{{"loadBalancingConfig": [{{"round_robin": {{}}}}], "methodConfig": [{{"name": [{{}}], "retryPolicy": {{
                    "maxAttempts": 2, "initialBackoff": "{backoff}", "maxBackoff": "1s", "backoffMultiplier": 2,
                    "retryableStatusCodes": ["{code}"]}}}}]}}"#
            ))
        };
        assert!(policy("1 minute", "ABORTED").contains("1 minute"));
        assert!(policy("-1s", "ABORTED").contains("-1s"));
        assert!(policy("1s", "GONE").contains("GONE"));
    }
}
