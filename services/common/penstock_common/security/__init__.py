"""TLS certificates and their expiry, the shared secret of internal ports, and calls that browsers make for other sites."""
