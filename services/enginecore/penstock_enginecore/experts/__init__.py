"""Experts of a model spread over the ranks of a data-parallel group."""
