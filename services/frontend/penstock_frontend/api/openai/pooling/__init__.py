"""Embedding, rerank, score and classification routes, in the forms of vLLM, Jina and Cohere."""
