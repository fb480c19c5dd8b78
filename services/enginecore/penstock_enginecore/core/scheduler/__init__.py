"""Chooses the requests and tokens of each step, and turns results into outputs. Start with ``scheduler.py``."""
