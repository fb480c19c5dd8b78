"""OpenAI's APIs over HTTP: chat completions, completions, embeddings, models, and what they share."""
