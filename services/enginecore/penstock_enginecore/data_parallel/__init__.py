"""A rank of a data-parallel group, and its metrics."""
