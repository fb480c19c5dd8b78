"""The public APIs, a package for each protocol, and rules that all protocols share."""
