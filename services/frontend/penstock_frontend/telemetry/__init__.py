"""Metrics of the frontend, and which tenants and clients have their own series and log lines."""
