"""Request inputs: validation, tokenization, sampling parameters, prompt embeddings, and sequences of a prompt."""
