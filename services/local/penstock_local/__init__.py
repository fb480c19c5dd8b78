"""The ``penstock`` command: the three services on one machine, and a client in the terminal."""
