"""Who keeps blocks of requests that go on elsewhere."""

import math
from collections.abc import Callable
from typing import Protocol

from penstock_common.types.kv_transfer import KvSource
from penstock_enginecore.core.request import Request


class KVLeases(Protocol):
    """Keeps blocks that no request of this engine holds any more, for whoever has the name of a lease. All calls come from the
    thread of the busy loop.
    """

    def grant(self, request: Request) -> KvSource | None:
        """Keep the blocks of a request that ends, with references beside its own, which it gives back right after this. None:
        refused, or nothing of it is whole.
        """

    def __len__(self) -> int:
        """Leases that are not over."""

    def next_expiry(self) -> float | None:
        """When the next one ends by itself, in monotonic seconds; None: none will."""

    def expire(self, now: float) -> None:
        """End those whose time is over."""

    def revoke_one(self) -> bool:
        """To make room: end the oldest that nothing is read from. False where there is none."""

    def revoke_all(self) -> None:
        """End all of them, whoever reads: blocks that are being copied stay until that has ended."""


def seconds_to_expiry(leases: KVLeases | None, clock: Callable[[], float]) -> float:
    """Until the next lease ends by itself, negative if it should have; infinite where none will. ``clock``: monotonic seconds."""
    expiry = None if leases is None else leases.next_expiry()
    return math.inf if expiry is None else expiry - clock()
