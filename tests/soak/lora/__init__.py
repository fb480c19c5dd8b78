"""Adapters that come, change and go under load, each of which tells who it is: ``python -m tests.soak.lora``."""
