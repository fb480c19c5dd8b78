"""Domain types that frontend and enginecore share. No protobuf, no torch: plain ``msgspec.Struct``."""
