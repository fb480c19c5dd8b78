"""Hostile media, hostile media hosts, and killed decoders."""
