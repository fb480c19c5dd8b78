"""The project's own benchmarks. ``make bench`` runs them; none of them is a test."""
