"""A model over several devices: its plan, its parts, and what passes between them."""
