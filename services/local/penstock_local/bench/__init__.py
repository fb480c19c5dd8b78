"""Implementation of ``penstock bench``, which sends a load to a running server and measures it."""
