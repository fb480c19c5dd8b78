"""gRPC services of vLLM that the frontend also offers."""
