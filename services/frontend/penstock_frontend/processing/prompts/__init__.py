"""Validation, tokenization, sampling parameters, prompts as vectors, several choices of one request."""
