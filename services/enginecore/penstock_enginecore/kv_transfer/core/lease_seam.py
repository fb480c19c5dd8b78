"""Who keeps blocks of requests that go on elsewhere."""

import math
from collections.abc import Callable
from typing import Protocol

from penstock_common.types.kv_transfer import KvSource
from penstock_common.types.outputs import KvTransferStats
from penstock_enginecore.core.kv_cache.manager import PrefixCacheStats
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

    @property
    def num_blocks(self) -> int:
        """Blocks that these keep."""

    @property
    def num_bytes(self) -> int:
        """Of these blocks, over all workers."""

    def next_expiry(self) -> float | None:
        """When the next one ends by itself, in monotonic seconds; None: none will."""

    def expire(self, now: float) -> int:
        """End those whose time is over. Returns how many gave their blocks back."""

    def revoke_one(self) -> bool:
        """To make room: end the oldest that nothing is read from. False where there is none."""

    def revoke_all(self) -> None:
        """End all of them, whoever reads: blocks that are being copied stay until that has ended."""


def kv_transfer_stats(found: PrefixCacheStats, leases: KVLeases | None) -> KvTransferStats:
    """What an engine tells of blocks from elsewhere, of which it ``found`` some, and of those that it keeps for others."""
    return KvTransferStats(
        external_prefix_cache_queries=found.queries,
        external_prefix_cache_hits=found.hits,
        num_leases=0 if leases is None else len(leases),
        num_leased_blocks=0 if leases is None else leases.num_blocks,
        leased_bytes=0 if leases is None else leases.num_bytes,
    )


def seconds_to_expiry(leases: KVLeases | None, clock: Callable[[], float]) -> float:
    """Until the next lease ends by itself, negative if it should have; infinite where none will. ``clock``: monotonic seconds."""
    expiry = None if leases is None else leases.next_expiry()
    return math.inf if expiry is None else expiry - clock()
