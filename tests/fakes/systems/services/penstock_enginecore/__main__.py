"""Stands in for the enginecore where the command that starts it is tested."""

from fake_service import main

main("enginecore")
