"""Every pair of an engine's features. An engine with both features produces the same tokens as a plain engine, or
refuses the pair.
"""
