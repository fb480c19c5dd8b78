"""gRPC services of the coordinator: sessions of engines and frontends, message conversion, and KEDA's external scaler."""
