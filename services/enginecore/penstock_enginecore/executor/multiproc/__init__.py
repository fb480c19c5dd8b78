"""Executor whose workers are separate processes, and the communication between the engine and its workers; see
docs/adr/0049.
"""
