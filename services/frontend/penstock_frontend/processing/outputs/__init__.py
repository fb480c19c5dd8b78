"""Request outputs: detokenization, stop strings, log-probabilities, and the collector from which calls read outputs."""
