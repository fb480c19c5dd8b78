"""Malformed and hostile requests at every RPC and route of a real system, and what they must not do to it."""
