"""Code that the services share: config, errors, logs, channels, servers, health, metrics, domain types. No torch."""
