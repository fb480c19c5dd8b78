"""gRPC servers and channels, and conversions between messages and domain types."""

import os

# gRPC's C library logs bytes that peers send, at a level below ERROR, so set the level to ERROR.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
