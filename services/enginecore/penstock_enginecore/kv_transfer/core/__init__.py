"""Blocks of keys and values that come from elsewhere, and go there."""
