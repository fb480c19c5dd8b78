"""Large tensors on a stream of messages, sent in chunks before the message that refers to them. No I/O and no messages
here.
"""
