"""Dispatch of requests to engines: connections, routing, the journal for resuming requests, drains, and KV transfer."""
