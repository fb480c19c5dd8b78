"""Towers that turn images, sound and video into embeddings of a language model."""
