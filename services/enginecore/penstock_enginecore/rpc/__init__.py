"""gRPC of the engine: sessions of frontends, message conversion, the coordinator client, sessions with other nodes."""
