"""Detokenization, stop strings, log-probabilities, and the collector that a client reads from."""
