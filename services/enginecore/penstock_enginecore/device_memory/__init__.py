"""GPU memory for weights and KV cache that can be freed during sleep and mapped again at the same addresses."""
