"""Public APIs of the frontend, with one package for each protocol, and modules that all protocols use."""
