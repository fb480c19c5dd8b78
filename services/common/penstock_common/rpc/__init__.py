"""What crosses processes: servers, channels, conversions."""

import os

# gRPC's own library writes what peers send into the process's log, at a level below this: any bytes of theirs.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
