"""Checks of JSON schemas, regular expressions and choices, and their translation into grammars."""
