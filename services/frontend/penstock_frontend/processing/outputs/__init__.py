"""Outputs of requests: detokenization, stop strings, log-probabilities, and the buffer from which calls read outputs."""
