"""What the services share: config, errors, logging, channels and servers, health, metrics, domain types. No torch."""
