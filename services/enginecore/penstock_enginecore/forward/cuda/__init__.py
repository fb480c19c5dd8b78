"""The GPU decoder: plans of model families, layers, CUDA graphs, LoRA adapters, sampling on the device."""
