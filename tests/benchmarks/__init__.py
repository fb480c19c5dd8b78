"""Benchmarks of the project. ``make bench`` runs them. They are not tests."""
