"""LoRA adapters as the engine core sees them: which are held, and which may run together."""
