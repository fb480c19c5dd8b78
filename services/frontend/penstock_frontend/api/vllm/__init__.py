"""vLLM's gRPC services."""
