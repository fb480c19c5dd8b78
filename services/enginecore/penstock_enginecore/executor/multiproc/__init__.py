"""Workers in processes of their own, and what passes between them and the engine: see docs/adr/0049."""
