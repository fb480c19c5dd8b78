"""Large tensors on a stream of messages: in chunks before the message that refers to them. Without I/O and without messages."""
