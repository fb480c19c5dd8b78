"""The HTTP listener: connections, parsing within limits, bodies, endpoints, streams, the OpenAPI document, telemetry, page."""
