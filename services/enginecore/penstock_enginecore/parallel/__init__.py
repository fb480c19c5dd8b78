"""A model over several devices: its plan, its parts, and the communication between them."""
