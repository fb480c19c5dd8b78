"""Processing of requests and of engines' outputs that all protocols share."""
