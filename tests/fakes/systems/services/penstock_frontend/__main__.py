"""Stands in for the frontend where the command that starts it is tested."""

from fake_service import main

main("frontend")
