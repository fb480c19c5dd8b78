"""Request inputs: validation, tokenization, sampling parameters, prompt embeddings, and multiple choices per request."""
