"""The interface of attention backends, KV cache memory and its layouts, and attention by torch."""
