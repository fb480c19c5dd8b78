"""The engine's logic, free of torch, grpc and generated stubs (a test enforces it)."""
