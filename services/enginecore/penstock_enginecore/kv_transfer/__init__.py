"""KV block transfer between device memory, host memory, disk, and other engines."""
