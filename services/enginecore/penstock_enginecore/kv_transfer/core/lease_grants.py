"""The engine as a source: what it grants to those that go on with its requests."""

import logging
import secrets
import time
from collections.abc import Callable

import msgspec

from penstock_common.types.kv_transfer import BlockName, KvSource
from penstock_enginecore.core.kv_cache.manager import KVCacheManager
from penstock_enginecore.core.request import Request
from penstock_enginecore.kv_transfer.core.leases import LEASE_ID_BYTES, Leases

_SETTLE = 10.0
"""Seconds that copies have to end: they take milliseconds."""
logger = logging.getLogger(__name__)


class LeasedBlocks:
    """Grants leases on what the pool has of a request. ``identity``: the engine's KvSource, without lease and tokens.

    All calls come from the thread of the busy loop.
    """

    def __init__(
        self,
        leases: Leases,
        kv_cache: KVCacheManager,
        identity: KvSource,
        *,
        block_bytes: int = 0,
        clock: Callable[[], float] = time.monotonic,
        new_id: Callable[[], bytes] = lambda: secrets.token_bytes(LEASE_ID_BYTES),
    ) -> None:
        self.leases = leases
        self._kv_cache = kv_cache
        self._identity = identity
        self._block_bytes = block_bytes
        self._clock = clock
        self._new_id = new_id

    def grant(self, request: Request) -> KvSource | None:
        """Take a reference to each block that somebody needs who goes on with the request: full ones that can be found, of groups
        with windows those that the next query sees. The request's own references may be given back then. None where there are
        no such blocks, or leases have too many.
        """
        computed = self._kv_cache.get_computed_blocks(request)
        if not computed.num_blocks:
            return None
        pool = self._kv_cache.pool
        tables, blocks = [], {}
        for group, table in enumerate(computed.blocks):
            for block, block_hash in zip(table, request.block_hashes, strict=False):
                if block is not pool.null_block:
                    blocks[BlockName(group, block_hash)] = block.block_id
            tables.append([block for block in table if block is not pool.null_block])
        for table in tables:
            pool.touch(table)
        lease = self.leases.grant(self._new_id(), tables, blocks, self._clock())
        if lease is None:
            for table in tables:
                pool.free(table)
            return None
        return msgspec.structs.replace(
            self._identity, lease_id=lease.lease_id, num_tokens=computed.num_blocks * self._kv_cache.block_size
        )

    def __len__(self) -> int:
        """Leases that have a reference to anything."""
        return len(self.leases)

    @property
    def num_blocks(self) -> int:
        return self.leases.num_blocks

    @property
    def num_bytes(self) -> int:
        return self.leases.num_blocks * self._block_bytes

    def next_expiry(self) -> float | None:
        """When ``expire`` has something to do, in the clock's seconds; 0 for at once, None without leases."""
        return self.leases.next_expiry()

    def expire(self, now: float) -> int:
        """End leases whose clock has run out, and give back what pulls have given up. Returns how many gave back."""
        return self.leases.expire(now)

    def revoke_one(self) -> bool:
        """To make room: end the oldest lease that nothing is read from. False where there is none."""
        return self.leases.revoke_one()

    def revoke_all(self) -> None:
        """The pool is to be empty: end all leases, and wait for the copies from their blocks that are under way."""
        if not self.leases.settle(_SETTLE):
            logger.error("blocks are still being copied for other engines after %g s", _SETTLE)
