"""Caches of media in the engine core, and scheduling of the encoders."""
