"""Every pair of an engine's features: what serves it is compared with a plain engine, or it is refused by name."""
