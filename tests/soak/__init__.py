"""Random requests, cancels and kills for minutes: ``python -m tests.soak``."""
