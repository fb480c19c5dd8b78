"""Checks JSON schemas, regular expressions and choices, and writes them as grammars."""
