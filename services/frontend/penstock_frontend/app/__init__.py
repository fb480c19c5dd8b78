"""The frontend process: assembly, servers, drain and shutdown."""
