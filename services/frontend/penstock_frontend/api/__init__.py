"""The public APIs, one package per protocol, and rules that all protocols share."""
