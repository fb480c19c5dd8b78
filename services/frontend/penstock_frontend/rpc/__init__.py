"""gRPC connections of the frontend: engine sessions, media transport, and the coordinator client."""
