"""gRPC connections of the frontend: sessions with engines, transport of media to engines, and the coordinator client."""
