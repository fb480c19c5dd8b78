"""Media of an engine's requests: what the engine caches of them, and when their embeddings are computed."""
