"""Speculative decoding. Each drafting method has its own file. ``base.py`` defines the interface of drafters."""
