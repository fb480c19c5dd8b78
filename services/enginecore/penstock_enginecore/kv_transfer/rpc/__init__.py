"""Blocks of keys and values from engine to engine."""
