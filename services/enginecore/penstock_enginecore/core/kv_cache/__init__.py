"""KV cache blocks: the block pool, groups of layers, prefix cache, sizing, and cache events."""
