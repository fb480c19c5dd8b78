"""Loading of checkpoints, with checks that reject models that would be served incorrectly."""
