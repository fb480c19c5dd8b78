"""Pooling: computation of embeddings, classes and scores from hidden states."""
