"""Frontend service: the public APIs in front of the engines.

The frontend loads no model weights and never imports torch.
"""
