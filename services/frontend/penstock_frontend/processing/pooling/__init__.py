"""Inputs and answers of requests for embeddings and scores."""
