"""Frontend service: it offers the public APIs to clients, and sends their requests to the engines. The frontend loads
no model weights and never imports torch.
"""
