"""Computation on CPUs with the project's own kernels, which are compiled when the package is built; see csrc/ and
docs/adr/0018.
"""
