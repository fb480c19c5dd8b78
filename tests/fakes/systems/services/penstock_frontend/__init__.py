"""Stands in for the frontend."""
