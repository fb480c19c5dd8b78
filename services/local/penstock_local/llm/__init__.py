"""The engine inside a Python program: ``LLM``."""
