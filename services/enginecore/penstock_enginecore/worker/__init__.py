"""Code that all kinds of workers use: messages between processes, errors that travel in messages, the device thread,
and results that arrive later.
"""
