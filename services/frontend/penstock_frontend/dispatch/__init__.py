"""Dispatch of requests to engines: connections, choice of an engine, the journal from which another engine can resume a
request, drains of engines, and KV transfer.
"""
