"""Constrains output to JSON schemas, regular expressions and grammars. Child processes compile constraints and compute
the masks of allowed tokens.
"""
