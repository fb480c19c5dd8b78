"""Forward passes for GPUs: the fused decoder with its layers and kernels, CUDA graphs, LoRA adapters, and sampling on
the device.
"""
