"""The coordinator: membership, load, and the waves of data-parallel groups."""
