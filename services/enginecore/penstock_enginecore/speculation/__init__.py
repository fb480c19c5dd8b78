"""Speculative decoding. Each drafting method has its own file. ``base.py`` is the interface of drafters."""
