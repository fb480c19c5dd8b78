"""The engine's logic. A test enforces that this package imports no torch, no grpc and no generated stubs."""
