"""Clients of the services that the command starts and calls."""
