"""The frontend: public APIs in front of engines. Holds no model weights and never imports torch."""
