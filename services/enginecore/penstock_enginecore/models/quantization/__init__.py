"""Formats of quantized weights: recognition, dequantization, and modules that keep quantized weights."""
