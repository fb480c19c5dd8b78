"""Constrained decoding in the engine core: holds requests until their constraint is compiled, gives steps the masks of
allowed tokens, and ends requests whose grammar fails.
"""
