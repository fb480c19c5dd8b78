"""Replacement for the coordinator in tests of the command that starts it."""

from fake_service import main

main("coordinator")
