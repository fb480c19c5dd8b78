"""HTTP listener: connections, parsing of requests within limits, request bodies, endpoints, streams, telemetry, and the
web page.
"""
