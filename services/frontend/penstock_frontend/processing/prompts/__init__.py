"""Inputs of requests: validation, tokenization, sampling parameters, prompt embeddings, and the ``n`` sequences of a
prompt.
"""
