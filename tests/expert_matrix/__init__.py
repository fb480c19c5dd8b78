"""Tests of every mixture-of-experts model type over several ranks."""
