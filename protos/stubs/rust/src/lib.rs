#![doc = include_str!("../README.md")]

/// gRPC service config (JSON) of the public API: load balancing, retries and health checks of channels.
pub const SERVICE_CONFIG: &str = include_str!("service_config.json");

