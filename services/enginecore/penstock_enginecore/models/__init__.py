"""Loads checkpoints, and refuses those that would be served wrongly."""
