"""Counts of kernels that were compiled in advance or when needed."""

from dataclasses import dataclass


@dataclass(slots=True)
class Lookups:
    """Kernels that were ``found`` in the cache, and kernels that were ``compiled``."""

    found: int = 0
    compiled: int = 0
