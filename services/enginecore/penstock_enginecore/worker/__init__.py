"""Shared basics of workers: messages between processes, failures, the device thread, and late results."""
