"""Calls of clients, independent of the protocol, with one file per kind of call. Admission is also in this package."""
