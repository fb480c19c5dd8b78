"""Families of checkpoints with media encoders."""
