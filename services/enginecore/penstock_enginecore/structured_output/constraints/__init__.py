"""Checks JSON schemas, regular expressions and choices, and translates them into grammars."""
