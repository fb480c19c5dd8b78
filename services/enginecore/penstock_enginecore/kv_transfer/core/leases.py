"""Blocks that the engine keeps for whoever goes on with a request that it has handed over."""

import enum
import logging
import math
import secrets
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import msgspec

from penstock_common.types.kv_transfer import BlockName, KvSource
from penstock_common.types.outputs import KvTransferStats
from penstock_enginecore.core.kv_cache.block_pool import KVCacheBlock
from penstock_enginecore.core.kv_cache.manager import KVCacheManager, PrefixCacheStats
from penstock_enginecore.core.request import Request

LEASE_ID_BYTES = 16


class LeaseState(enum.Enum):
    """GRANTED: no pull is open, and the clock runs. OPEN: a pull is. The others are ends."""

    GRANTED = "granted"
    OPEN = "open"
    RELEASED = "released"
    EXPIRED = "expired"
    REVOKED = "revoked"

    @property
    def ended(self) -> bool:
        """Whether nothing is read under it any more."""
        return self not in (LeaseState.GRANTED, LeaseState.OPEN)


class Lease:
    """One reference to each block of ``tables``, whose contents ``blocks`` names: a block that has a reference keeps its content.

    ``num_pulls``: streams that have it open; ``num_fetches``: what these have asked for and not got; ``num_reads``: copies from
    its blocks that are under way. Times are in the clock's seconds: at ``expires_at`` it ends without a pull, at ``ends_by`` in
    any case.
    """

    __slots__ = (
        "blocks",
        "ends_by",
        "expires_at",
        "lease_id",
        "num_fetches",
        "num_pulls",
        "num_reads",
        "state",
        "tables",
    )

    def __init__(
        self,
        lease_id: bytes,
        tables: Sequence[Sequence[KVCacheBlock]],
        blocks: Mapping[BlockName, int],
        *,
        expires_at: float,
        ends_by: float,
    ) -> None:
        self.lease_id = lease_id
        self.tables = tables
        self.blocks = blocks
        self.state = LeaseState.GRANTED
        self.num_pulls = 0
        self.num_fetches = 0
        self.num_reads = 0
        self.expires_at = expires_at
        self.ends_by = ends_by

    @property
    def clock_ends(self) -> float:
        """When it ends unless something happens."""
        return self.ends_by if self.num_pulls else min(self.expires_at, self.ends_by)


class Leases:
    """Those of an engine, oldest first. Each is granted once, ends once, and gives its references back once: when it ends, or
    when the copies have ended that were under way then. What is told of one that has ended, or never was, changes nothing.

    ``grant``, ``expire``, ``revoke_one`` and ``revoke_all`` belong to the thread of the busy loop, which is the only one on which
    references are given back; the others may be called on any thread, so that no pull waits for a step. ``now`` is of one clock.
    """

    def __init__(
        self,
        free: Callable[[Sequence[KVCacheBlock]], None],
        max_blocks: int,
        *,
        lease_seconds: float = 5.0,
        max_seconds: float = 600.0,
    ) -> None:
        """``free`` takes back one reference to each of these (``BlockPool.free``). ``max_blocks``: that leases may have together,
        each counted once. ``lease_seconds``: without a pull. ``max_seconds``: with one.
        """
        self._free = free
        self._max_blocks = max_blocks
        self.lease_seconds = lease_seconds
        self._max_seconds = max_seconds
        self._lock = threading.Condition()
        self._leases: dict[bytes, Lease] = {}
        self._read_on: dict[bytes, Lease] = {}
        """Leases that have ended while copies from their blocks were under way."""
        self._over: list[Lease] = []
        """Those whose references are to be given back."""
        self._holders: Counter[int] = Counter()
        """By block id, the leases that have a reference to it."""
        self.ends: Counter[LeaseState] = Counter()
        """Leases that have ended, by how."""
        self.num_refused = 0

    def __len__(self) -> int:
        """Leases that have a reference to anything."""
        return len(self._leases) + len(self._read_on) + len(self._over)

    def __contains__(self, lease_id: bytes) -> bool:
        """Whether it has been granted and has not ended."""
        return lease_id in self._leases

    def get(self, lease_id: bytes) -> Lease | None:
        """The lease, unless it has ended."""
        return self._leases.get(lease_id)

    @property
    def num_blocks(self) -> int:
        """Blocks that leases have a reference to, each counted once."""
        return len(self._holders)

    # The thread of the busy loop.

    def grant(
        self,
        lease_id: bytes,
        tables: Sequence[Sequence[KVCacheBlock]],
        blocks: Mapping[BlockName, int],
        now: float,
    ) -> Lease | None:
        """Take over the caller's references to the blocks of ``tables``, without null blocks. ``blocks``: their ids by content.
        None where leases would have too many blocks: then the caller keeps its references. Raises ValueError for an id that is
        in use.
        """
        if lease_id in self._leases or lease_id in self._read_on:
            raise ValueError(f"lease {lease_id.hex()} is there already")
        ids = _ids(tables)
        if len(ids | self._holders.keys()) > self._max_blocks:
            self.num_refused += 1
            return None
        lease = Lease(lease_id, tables, blocks, expires_at=now + self.lease_seconds, ends_by=now + self._max_seconds)
        with self._lock:
            self._leases[lease_id] = lease
        self._holders.update(ids)
        return lease

    def expire(self, now: float) -> int:
        """End those whose clock has run out, and give back what others have given up. Returns how many gave back."""
        with self._lock:
            for lease in [lease for lease in self._leases.values() if lease.clock_ends <= now]:
                self._end(lease, LeaseState.EXPIRED)
        return self._give_back()

    def next_expiry(self) -> float | None:
        """When ``expire`` has something to do: 0 for at once, None without leases."""
        if self._over:
            return 0.0
        with self._lock:
            return min((lease.clock_ends for lease in self._leases.values()), default=None)

    def revoke_one(self) -> bool:
        """To make room: end the oldest lease that nothing is read from. False where there is none."""
        with self._lock:
            oldest = next((each for each in self._leases.values() if not each.num_fetches), None)
            if oldest is not None:
                self._end(oldest, LeaseState.REVOKED)
        return self._give_back() > 0

    def revoke_all(self) -> None:
        """The pool is to be empty: end all. Copies that are under way keep their blocks until they have ended."""
        with self._lock:
            for lease in list(self._leases.values()):
                self._end(lease, LeaseState.REVOKED)
        self._give_back()

    def settle(self, seconds: float) -> bool:
        """End all, and wait for copies that are under way. False where they have not ended in so many seconds."""
        self.revoke_all()
        with self._lock:
            settled = self._lock.wait_for(lambda: not self._read_on, seconds)
        self._give_back()
        return settled

    # Any thread.

    def opened(self, lease_id: bytes) -> Lease | None:
        """A pull of it is open from now on; None where there is no such lease."""
        with self._lock:
            lease = self._leases.get(lease_id)
            if lease is not None:
                lease.num_pulls += 1
                lease.state = LeaseState.OPEN
            return lease

    def closed(self, lease_id: bytes, now: float) -> None:
        """A pull that was opened is not any more."""
        with self._lock:
            lease = self._leases.get(lease_id)
            if lease is None:
                return
            lease.num_pulls -= 1
            if not lease.num_pulls:
                lease.state = LeaseState.GRANTED
                lease.expires_at = now + self.lease_seconds

    def fetch_began(self, lease_id: bytes) -> None:
        """A pull has asked for blocks: the lease is not revoked to make room."""
        with self._lock:
            if (lease := self._leases.get(lease_id)) is not None:
                lease.num_fetches += 1

    def fetch_ended(self, lease_id: bytes) -> None:
        """A pull has what it asked for, or is over."""
        with self._lock:
            if (lease := self._leases.get(lease_id)) is not None:
                lease.num_fetches -= 1

    def read_began(self, lease_id: bytes, names: Sequence[BlockName]) -> list[int | None] | None:
        """The blocks with these contents, None for one that the lease does not have. They stay as they are until ``read_ended``.
        None altogether where there is no such lease: then there is no read.
        """
        with self._lock:
            lease = self._leases.get(lease_id)
            if lease is None:
                return None
            lease.num_reads += 1
            return [lease.blocks.get(name) for name in names]

    def read_ended(self, lease_id: bytes) -> bool:
        """A read is over. Returns whether there is something to give back now: the busy loop should be woken."""
        with self._lock:
            lease = self._leases.get(lease_id) or self._read_on[lease_id]
            lease.num_reads -= 1
            if lease.num_reads or not lease.state.ended:
                return False
            del self._read_on[lease_id]
            self._over.append(lease)
            self._lock.notify_all()
            return True

    def released(self, lease_id: bytes) -> bool:
        """Whoever pulled needs it no more. Returns whether there is something to give back now."""
        with self._lock:
            if (lease := self._leases.get(lease_id)) is not None:
                self._end(lease, LeaseState.RELEASED)
            return bool(self._over)

    def _end(self, lease: Lease, state: LeaseState) -> None:
        del self._leases[lease.lease_id]
        lease.state = state
        self.ends[state] += 1
        if lease.num_reads:
            self._read_on[lease.lease_id] = lease
        else:
            self._over.append(lease)

    def _give_back(self) -> int:
        with self._lock:
            over, self._over = self._over, []
        for lease in over:
            self._holders.subtract(_ids(lease.tables))
            for table in lease.tables:
                self._free(table)
        if over:
            self._holders = +self._holders
        return len(over)


def _ids(tables: Sequence[Sequence[KVCacheBlock]]) -> set[int]:
    return {block.block_id for table in tables for block in table}


# The engine as a source: what it grants to those that go on with its requests.

_SETTLE = 10.0
"""Seconds that copies have to end: they take milliseconds."""
logger = logging.getLogger(__name__)


class LeasedBlocks:
    """Grants leases on what the pool has of a request, from ``begin`` on. All calls come from the thread of the busy loop."""

    def __init__(
        self, clock: Callable[[], float], new_id: Callable[[], bytes] = lambda: secrets.token_bytes(LEASE_ID_BYTES)
    ) -> None:
        self.leases = Leases(lambda _: None, 0)
        self._clock = clock
        self._new_id = new_id
        self._block_bytes = 0
        self._source: tuple[KVCacheManager, KvSource] | None = None

    def begin(self, leases: Leases, kv_cache: KVCacheManager, identity: KvSource, *, block_bytes: int = 0) -> None:
        """Other engines can read the blocks. ``identity``: the engine's KvSource, without lease and tokens."""
        self.leases, self._source = leases, (kv_cache, identity)
        self._block_bytes = block_bytes

    def grant(self, request: Request) -> KvSource | None:
        """Take a reference to each block that somebody needs who goes on with the request: full ones that can be found, of groups
        with windows those that the next query sees. The request's own references may be given back then. None where there are
        no such blocks, or leases have too many.
        """
        if self._source is None:
            return None
        kv_cache, identity = self._source
        computed = kv_cache.get_computed_blocks(request)
        if not computed.num_blocks:
            return None
        pool = kv_cache.pool
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
            identity, lease_id=lease.lease_id, num_tokens=computed.num_blocks * kv_cache.block_size
        )

    def __len__(self) -> int:
        """Leases that have a reference to anything."""
        return len(self.leases)

    def seconds_to_expiry(self) -> float:
        """Until ``expire`` has something to do, negative if it should have had; infinite without leases."""
        expiry = self.leases.next_expiry()
        return math.inf if expiry is None else expiry - self._clock()

    def expire(self) -> int:
        """End leases whose clock has run out, and give back what pulls have given up. Returns how many gave back."""
        return self.leases.expire(self._clock()) if self.leases else 0

    def revoke_one(self) -> bool:
        """To make room: end the oldest lease that nothing is read from. False where there is none."""
        return bool(self.leases) and self.leases.revoke_one()

    def revoke_all(self) -> None:
        """The pool is to be empty: end all leases, and wait for the copies from their blocks that are under way."""
        if not self.leases.settle(_SETTLE):
            logger.error("blocks are still being copied for other engines after %g s", _SETTLE)

    def stats(self, found: PrefixCacheStats) -> KvTransferStats:
        """What the engine tells of blocks from elsewhere, of which it ``found`` some, and of those that it keeps for others."""
        return KvTransferStats(
            external_prefix_cache_queries=found.queries,
            external_prefix_cache_hits=found.hits,
            num_leases=len(self.leases),
            num_leased_blocks=self.leases.num_blocks,
            leased_bytes=self.leases.num_blocks * self._block_bytes,
        )
