"""LoRA adapters: low-rank updates of a base model's linear layers. Requests in the same step may use different
adapters.
"""
