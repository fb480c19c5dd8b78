"""Workers in separate processes, and their communication with the engine: see docs/adr/0049."""
