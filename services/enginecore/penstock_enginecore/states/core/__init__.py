"""Accounting of states, without torch: slots, kept states and pool sizes."""
