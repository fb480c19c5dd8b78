"""Soak test of LoRA adapters that are loaded, replaced and unloaded under load.

Each adapter's answers identify it. Run with ``python -m tests.soak.lora``.
"""
