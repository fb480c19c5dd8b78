"""TLS certificates and their expiry, the shared secret of internal ports, and refusal of calls from other web sites."""
