"""Transfer of KV blocks between engines: gRPC service, client, and transports for the bytes."""
