"""Compiles Triton kernels before they are needed, also for GPUs that are not there, and finds them again."""
