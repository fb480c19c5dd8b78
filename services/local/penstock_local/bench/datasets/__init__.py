"""What the requests of a benchmark ask: one file for each dataset, and what makes them by name."""
