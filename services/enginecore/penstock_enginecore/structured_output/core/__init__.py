"""Constrained requests as the engine core sees them: compiled, masked, and ended when their grammar fails."""
