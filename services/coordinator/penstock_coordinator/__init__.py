"""Coordinator service, which tracks the membership and load of engines, and the waves of data-parallel groups."""
