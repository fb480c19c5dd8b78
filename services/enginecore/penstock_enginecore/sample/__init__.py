"""Sampling of tokens from logits: rules of a request, filters, random draws, penalties, log-probabilities, and
verification of draft tokens.
"""
