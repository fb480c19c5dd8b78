"""What families of checkpoints with towers have of their own."""
