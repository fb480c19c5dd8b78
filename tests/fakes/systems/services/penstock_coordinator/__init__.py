"""Stands in for the coordinator."""
