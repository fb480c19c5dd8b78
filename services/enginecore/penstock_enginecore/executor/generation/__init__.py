"""Model runner for requests that sample tokens: input batch, media and vectors in prompts, log-probabilities."""
