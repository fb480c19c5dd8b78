"""Processing of requests and outputs that all protocols share."""
