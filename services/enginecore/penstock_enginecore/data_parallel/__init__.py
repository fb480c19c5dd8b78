"""Data-parallel groups: an engine as one rank of a group, and the metrics of the rank."""
