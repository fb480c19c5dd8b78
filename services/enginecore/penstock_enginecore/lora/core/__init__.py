"""LoRA adapters in the engine core: decides which adapters stay in memory, and which adapters may run together."""
