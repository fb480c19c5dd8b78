"""The HTTP listener: connections, parsing within limits, streams, telemetry, the page at ``/``."""
