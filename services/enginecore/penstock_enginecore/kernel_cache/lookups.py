"""Numbers of kernels that were found in the cache, and of kernels that had to be compiled while the engine ran."""

from dataclasses import dataclass


@dataclass(slots=True)
class Lookups:
    """Number of kernels that were ``found`` in the cache, and number of kernels that were ``compiled``."""

    found: int = 0
    compiled: int = 0
