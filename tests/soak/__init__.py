"""Soak test: minutes of random requests, cancels and kills. Run with ``python -m tests.soak``."""
