"""Runs the model: the executors, the worker, loading of weights, sleep, and the device thread."""
