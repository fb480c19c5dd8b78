"""Turns hidden states into embeddings, classes and scores."""
