"""Transfer of large tensors on a stream: the sender sends chunks before the message that refers to the tensor.

This package does no I/O and knows no message types.
"""
