"""Triton kernels: normalisation, attention, matrix products, experts, inputs of decode steps, sampling."""
