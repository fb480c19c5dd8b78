"""Model runner of a model that generates tokens: input batch, media and embeddings in prompts, sampling, and
log-probabilities.
"""
