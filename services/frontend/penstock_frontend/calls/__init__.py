"""Handling of client calls for all protocols, with one file per kind of call. This package also decides whether a
request is admitted.
"""
