"""How many kernels had been compiled before they were needed."""

from dataclasses import dataclass


@dataclass(slots=True)
class Lookups:
    """Kernels that were ``found``, and those that were ``compiled``."""

    found: int = 0
    compiled: int = 0
