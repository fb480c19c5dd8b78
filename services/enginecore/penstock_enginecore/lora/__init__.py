"""LoRA adapters: low-rank updates of a base model's linear layers, which requests of a step may have."""
