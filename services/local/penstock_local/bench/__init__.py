"""``penstock bench``: sends a load to a running server and measures it."""
