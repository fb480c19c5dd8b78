"""HTTP listener: connections, parsing with limits, request bodies, endpoints, streams, OpenAPI document, telemetry, and
the web page.
"""
