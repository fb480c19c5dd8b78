"""What another server answers to the same requests: ``python -m tests.peers.answers``."""
