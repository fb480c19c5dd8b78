"""``penstock bench``: a load on a running server, and how it fared."""
