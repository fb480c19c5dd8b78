"""Media of an engine's requests: what it keeps of them, and when their embeddings are computed."""
