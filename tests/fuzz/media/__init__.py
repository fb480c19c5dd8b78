"""Hostile media, their hosts, and decoders that are killed."""
