"""Malformed and hostile requests at every RPC and route of a real system, with checks that they do no harm."""
