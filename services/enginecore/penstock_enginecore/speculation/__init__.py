"""Speculative decoding: one file for each way to draft tokens. ``base.py`` is the interface."""
