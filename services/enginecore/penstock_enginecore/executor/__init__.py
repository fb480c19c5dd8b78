"""Execution of steps with the model: executors, the worker of a device, loading of weights, and sleep."""
