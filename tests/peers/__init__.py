"""Comparison with another server's answers to the same requests: ``python -m tests.peers.answers``."""
