"""KV blocks that leave an engine and come back: to host memory, to disk, and to other engines."""
