"""Recurrent states by Triton kernels: index tensors of a step, kernels, and the context that calls them."""
