"""Stands in for the enginecore."""
