"""Which LoRA adapters an engine holds, as it tells the cluster."""

import msgspec

MAX_HELD = 512
"""Adapters of either kind that an engine tells of."""
_KEY_BYTES = 8


class LoraHeld(msgspec.Struct, frozen=True, kw_only=True):
    """Adapters by what is ``short`` for their digests: ``active`` have a slot, ``held`` are in host memory or on their way there,
    the active ones among them. At most MAX_HELD each; an adapter that is not told of counts as one that is not there.
    """

    version: int = 0
    """Grows with every change; of one incarnation of an engine the highest counts."""
    active: tuple[int, ...] = ()
    held: tuple[int, ...] = ()
    max_loras: int = 0
    """How many can be active at once."""
    requests_per_load: float = 0.0
    """Requests with adapters that the engine ends while it loads one; 0: not known."""
    full: bool = False
    """Whether the next one that is loaded takes the place of others."""


def short(digest: bytes) -> int:
    """What stands for a digest of 16 bytes: routing alone would take two adapters for each other of which it is the same."""
    return int.from_bytes(digest[:_KEY_BYTES], "little")
