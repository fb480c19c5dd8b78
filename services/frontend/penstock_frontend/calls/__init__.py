"""Calls of clients, independent of the protocol, with one file per kind of call. This package also decides whether a
request is admitted.
"""
