#![doc = include_str!("../README.md")]

/// How channels to the public API balance, retry and watch health: a gRPC service config, in JSON.
pub const SERVICE_CONFIG: &str = include_str!("service_config.json");

