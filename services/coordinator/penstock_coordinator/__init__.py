"""The coordinator service: membership and load of engines, and the waves of data-parallel groups."""
