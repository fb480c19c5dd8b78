"""The failure matrix: what is asked for, what must come, how engines fail, and the table of it."""
