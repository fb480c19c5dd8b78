"""Formats of quantized weights: how they are recognised, what their tensors mean, and the modules that keep them."""
