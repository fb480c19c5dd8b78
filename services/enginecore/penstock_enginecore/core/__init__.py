"""The engine's logic, which imports no torch, no grpc and no generated stubs. A test enforces this rule."""
