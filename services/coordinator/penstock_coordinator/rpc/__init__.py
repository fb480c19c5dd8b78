"""gRPC services of the coordinator: sessions with engines and frontends, and the external scaler for KEDA."""
