"""Encoders that convert images, audio and video to embeddings of a language model."""
