"""The gRPC sessions of engines and frontends, message conversion, and the external scaler of KEDA."""
