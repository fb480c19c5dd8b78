"""Benchmarks of the coordinator with a thousand engines and a hundred frontends."""
