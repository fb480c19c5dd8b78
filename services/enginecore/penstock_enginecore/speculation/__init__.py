"""Speculative decoding: a file for each way to draft tokens. ``base.py`` is the interface."""
