"""Cache of Triton kernels that are compiled in advance, also for GPUs that are not present."""
