"""Stands in for the coordinator where the command that starts it is tested."""

from fake_service import main

main("coordinator")
