"""gRPC servers and channels, and conversions between messages and domain types."""

import os

# At levels below ERROR, gRPC's C library logs bytes from peers. Log only errors.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
