"""Routes for embeddings, reranking, scores and classes, in the forms of vLLM, Jina and Cohere."""
