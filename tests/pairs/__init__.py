"""Every pair of an engine's features. An engine with both gives a plain engine's tokens, or refuses the pair by name."""
