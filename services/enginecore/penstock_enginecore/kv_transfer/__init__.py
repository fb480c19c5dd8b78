"""KV block transfer to host memory, to disk, and between engines."""
