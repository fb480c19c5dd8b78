"""Compute on CPUs with kernels of our own, compiled when the package is built: see csrc/ and docs/adr/0018."""
