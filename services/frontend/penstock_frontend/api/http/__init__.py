"""HTTP listener: connections, parsing with limits, request bodies, endpoints, streams, telemetry, and web page."""
