"""Replacement for the frontend in tests of the command that starts it."""

from fake_service import main

main("frontend")
