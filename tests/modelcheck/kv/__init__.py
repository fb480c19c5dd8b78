"""Leases, pulls and loads of two engines: every order of what may happen, up to bounds."""
