"""Constrains output to schemas, expressions and grammars. Grammars are compiled and followed in child processes."""
