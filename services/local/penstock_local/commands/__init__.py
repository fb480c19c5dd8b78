"""Subcommands of ``penstock`` that call a running system, and the tables that they print."""
