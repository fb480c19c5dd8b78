"""Model runner for requests that return embeddings, classes or scores."""
