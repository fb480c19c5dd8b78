"""Leases and pulls between two engines: every order of what may happen, up to bounds."""
