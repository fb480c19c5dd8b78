"""Public APIs, one package per protocol, and modules that all protocols use."""
