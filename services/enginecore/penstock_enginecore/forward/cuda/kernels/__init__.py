"""Triton kernels for normalisation, attention, matrix products, experts, writing the KV cache, and sampling."""
