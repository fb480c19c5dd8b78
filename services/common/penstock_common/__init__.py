"""Code that all services use: config, errors, logs, channels, servers, health, metrics, domain types. No torch."""
