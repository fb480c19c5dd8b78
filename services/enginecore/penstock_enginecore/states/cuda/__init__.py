"""Computation of recurrent layers with Triton kernels: index tensors of a step, the kernels, and the context that calls
the kernels.
"""
