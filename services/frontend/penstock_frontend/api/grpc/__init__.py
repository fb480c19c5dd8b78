"""Penstock's own gRPC services."""
