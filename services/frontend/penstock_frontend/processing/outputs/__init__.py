"""Request outputs: detokenization, stop strings, log-probabilities, and the collector that clients read from."""
