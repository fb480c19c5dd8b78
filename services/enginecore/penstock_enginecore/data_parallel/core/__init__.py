"""State machine of a rank whose group computes every step together."""
