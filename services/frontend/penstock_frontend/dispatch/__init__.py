"""Sends requests to engines: connections, placement, the journal that resumes requests elsewhere, drains, KV transfer."""
