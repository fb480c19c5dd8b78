"""Pooling: computes embeddings, classes and scores from hidden states."""
