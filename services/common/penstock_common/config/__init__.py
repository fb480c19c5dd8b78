"""Reads the settings of a service from a file, the environment and flags, and checks their ranges."""
