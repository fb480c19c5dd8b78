"""Constrained decoding in the engine core: holds requests until their grammar is compiled, adds masks to steps, and
ends requests whose grammar fails.
"""
