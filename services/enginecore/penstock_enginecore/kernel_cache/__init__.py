"""Cache of Triton kernels that are compiled in advance. The GPUs for which they are compiled need not be present."""
