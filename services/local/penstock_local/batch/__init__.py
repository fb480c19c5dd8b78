"""Implementation of ``penstock batch``, which reads a file of requests and writes a file of answers."""
