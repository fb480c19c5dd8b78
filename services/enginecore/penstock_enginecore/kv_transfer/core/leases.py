"""Leases on KV blocks. When a request is handed over, this engine keeps the request's blocks for the engine that
resumes the request.
"""

import enum
import logging
import math
import secrets
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import msgspec

from penstock_common.types.kv_transfer import STATE_GROUP, BlockName, KvSource
from penstock_common.types.outputs import KvTransferStats
from penstock_enginecore.core.kv_cache.block_pool import ComputedBlocks, KVCacheBlock
from penstock_enginecore.core.kv_cache.manager import KVCacheManager, PrefixCacheStats
from penstock_enginecore.core.request import Request

LEASE_ID_BYTES = 16


class LeaseState(enum.Enum):
    """State of a lease on KV blocks.

    Attributes:
        GRANTED: No engine has an open pull of the lease's blocks, and the lease time is running.
        OPEN: Another engine has an open pull, a stream that fetches blocks.
        RELEASED: The pulling engine released the lease.
        EXPIRED: The lease time ran out.
        REVOKED: The engine ended the lease, for example to free blocks.
    """

    GRANTED = "granted"
    OPEN = "open"
    RELEASED = "released"
    EXPIRED = "expired"
    REVOKED = "revoked"

    @property
    def ended(self) -> bool:
        """Whether the lease has ended, so that no new read of its blocks may begin."""
        return self not in (LeaseState.GRANTED, LeaseState.OPEN)


class Lease:
    """A lease, which has one reference to each block of ``tables``. If the model has recurrent layers, the lease also
    has a reference to the slot of the state at the end of these blocks. A block or slot with a reference keeps its
    content.

    Points in time are in seconds on the caller's clock.

    Attributes:
        blocks: Ids of the blocks, and of the slot, by the name of the content.
        slot: Slot of the state at the end of the blocks, or None.
        num_pulls: Number of open pulls.
        num_fetches: Number of fetch requests of these pulls that are not complete.
        num_reads: Number of copies in flight that read blocks of the lease.
        expires_at: Time at which the lease ends if no pull is open.
        ends_by: Time at which the lease ends even if a pull is open.
    """

    __slots__ = (
        "blocks",
        "ends_by",
        "expires_at",
        "lease_id",
        "num_fetches",
        "num_pulls",
        "num_reads",
        "slot",
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
        slot: KVCacheBlock | None = None,
    ) -> None:
        self.lease_id = lease_id
        self.tables = tables
        self.slot = slot
        self.blocks = blocks
        self.state = LeaseState.GRANTED
        self.num_pulls = 0
        self.num_fetches = 0
        self.num_reads = 0
        self.expires_at = expires_at
        self.ends_by = ends_by

    @property
    def clock_ends(self) -> float:
        """Time at which the lease ends if no pull is opened or closed before this time."""
        return self.ends_by if self.num_pulls else min(self.expires_at, self.ends_by)


class Leases:
    """Tracks the leases that an engine has granted, oldest first.

    A lease is granted once and ends once. The lease's references to blocks are dropped once: when the lease ends, or
    when the last copy in flight ends, whichever is later. Calls for an ended or unknown lease have no effect.

    Only the busy loop's thread may call ``grant``, ``expire``, ``revoke_one`` and ``revoke_all``, because only this
    thread drops references. The other methods are thread-safe, so that no pull waits for a step. The arguments ``now``
    must all be times of the same clock.
    """

    def __init__(
        self,
        free: Callable[[Sequence[KVCacheBlock]], None],
        max_blocks: int,
        *,
        lease_seconds: float = 5.0,
        max_seconds: float = 600.0,
        free_slot: Callable[[KVCacheBlock], None] = lambda _: None,
        max_slots: int = 0,
    ) -> None:
        """Create an empty set of leases.

        Args:
            free: Function that drops one reference to each of the given blocks (``BlockPool.free``).
            max_blocks: Maximum number of blocks in all leases together. A block in several leases counts once.
            free_slot: Function that drops one reference to the slot of a state.
            max_slots: Maximum number of leases with the slot of a state.
            lease_seconds: Duration of a lease without an open pull, in seconds.
            max_seconds: Maximum duration of a lease with open pulls, in seconds.
        """
        self._free = free
        self._free_slot = free_slot
        self._max_blocks = max_blocks
        self._max_slots = max_slots
        self._num_slots = 0
        self.lease_seconds = lease_seconds
        self._max_seconds = max_seconds
        self._lock = threading.Condition()
        self._leases: dict[bytes, Lease] = {}
        self._read_on: dict[bytes, Lease] = {}
        """Leases that have ended, but whose blocks are still being copied, by lease id."""
        self._over: list[Lease] = []
        """Leases that have ended, and whose references the busy loop's thread must drop."""
        self._holders: Counter[int] = Counter()
        """Number of leases that have a reference to each block, by block id."""
        self.ends: Counter[LeaseState] = Counter()
        """Number of ended leases, by the state in which they ended."""
        self.num_refused = 0

    def __len__(self) -> int:
        """Return the number of leases that have references to blocks."""
        return len(self._leases) + len(self._read_on) + len(self._over)

    def __contains__(self, lease_id: bytes) -> bool:
        """Return whether a lease has been granted and has not ended."""
        return lease_id in self._leases

    def get(self, lease_id: bytes) -> Lease | None:
        """Return the lease with this id, or None if the lease has ended or is unknown."""
        return self._leases.get(lease_id)

    @property
    def num_blocks(self) -> int:
        """Number of blocks to which leases have references. A block in several leases counts once."""
        return len(self._holders)

    # Methods for the busy loop's thread.

    def grant(
        self,
        lease_id: bytes,
        tables: Sequence[Sequence[KVCacheBlock]],
        blocks: Mapping[BlockName, int],
        now: float,
        slot: KVCacheBlock | None = None,
    ) -> Lease | None:
        """Grant a lease. The lease takes over the caller's references to ``slot`` and to the blocks of ``tables``.
        ``tables`` must not include null blocks.

        ``blocks`` has the ids of the blocks by the name of their content. Return None if all leases together would have
        too many blocks. In that case, the caller keeps its references. Raises ValueError if the id is in use.
        """
        if lease_id in self._leases or lease_id in self._read_on:
            raise ValueError(f"lease id {lease_id.hex()} is already in use")
        ids = _ids(tables)
        too_many_slots = slot is not None and self._num_slots >= self._max_slots
        if too_many_slots or len(ids | self._holders.keys()) > self._max_blocks:
            self.num_refused += 1
            return None
        expires_at, ends_by = now + self.lease_seconds, now + self._max_seconds
        lease = Lease(lease_id, tables, blocks, expires_at=expires_at, ends_by=ends_by, slot=slot)
        self._num_slots += slot is not None
        with self._lock:
            self._leases[lease_id] = lease
        self._holders.update(ids)
        return lease

    def expire(self, now: float) -> int:
        """End leases whose time has run out. Drop the references of ended leases whose blocks are not being copied.
        Return the number of leases that dropped references.
        """
        with self._lock:
            for lease in [lease for lease in self._leases.values() if lease.clock_ends <= now]:
                self._end(lease, LeaseState.EXPIRED)
        return self._give_back()

    def next_expiry(self) -> float | None:
        """Return the time at which ``expire`` must be called next. A result of 0 means now, and None means that there
        are no leases.
        """
        if self._over:
            return 0.0
        with self._lock:
            return min((lease.clock_ends for lease in self._leases.values()), default=None)

    def revoke_one(self) -> bool:
        """End the oldest lease without an open fetch request, to free its blocks. Return False if there is no such
        lease.
        """
        with self._lock:
            oldest = next((each for each in self._leases.values() if not each.num_fetches), None)
            if oldest is not None:
                self._end(oldest, LeaseState.REVOKED)
        return self._give_back() > 0

    def revoke_all(self) -> None:
        """End all leases to free all leased blocks. Blocks that copies in flight read are freed once the copies have
        ended.
        """
        with self._lock:
            for lease in list(self._leases.values()):
                self._end(lease, LeaseState.REVOKED)
        self._give_back()

    def settle(self, seconds: float) -> bool:
        """End all leases, and wait for copies in flight. Return False if the copies have not ended within ``seconds``."""
        self.revoke_all()
        with self._lock:
            settled = self._lock.wait_for(lambda: not self._read_on, seconds)
        self._give_back()
        return settled

    # Thread-safe methods.

    def opened(self, lease_id: bytes) -> Lease | None:
        """Record that a pull was opened. Return the lease with this id, or None if the lease has ended or is
        unknown.
        """
        with self._lock:
            lease = self._leases.get(lease_id)
            if lease is not None:
                lease.num_pulls += 1
                lease.state = LeaseState.OPEN
            return lease

    def closed(self, lease_id: bytes, now: float) -> None:
        """Record that a pull of the lease's blocks was closed."""
        with self._lock:
            lease = self._leases.get(lease_id)
            if lease is None:
                return
            lease.num_pulls -= 1
            if not lease.num_pulls:
                lease.state = LeaseState.GRANTED
                lease.expires_at = now + self.lease_seconds

    def fetch_began(self, lease_id: bytes) -> None:
        """Record that a pull requested blocks of the lease. Until ``fetch_ended``, the lease is not revoked to free
        blocks.
        """
        with self._lock:
            if (lease := self._leases.get(lease_id)) is not None:
                lease.num_fetches += 1

    def fetch_ended(self, lease_id: bytes) -> None:
        """Record that a fetch request of a pull is complete, or that the pull ended."""
        with self._lock:
            if (lease := self._leases.get(lease_id)) is not None:
                lease.num_fetches -= 1

    def read_began(self, lease_id: bytes, names: Sequence[BlockName]) -> list[int | None] | None:
        """Record that a read of blocks of the lease begins, and return the block ids. An id is None if the lease does
        not have the block.

        The blocks keep their content until ``read_ended``. If the lease does not exist, return None and begin no read.
        """
        with self._lock:
            lease = self._leases.get(lease_id)
            if lease is None:
                return None
            lease.num_reads += 1
            return [lease.blocks.get(name) for name in names]

    def read_ended(self, lease_id: bytes) -> bool:
        """Record the end of a read of blocks. Return whether the lease's references can now be dropped. If the result
        is True, the caller should wake the busy loop.
        """
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
        """Record that the pulling engine released the lease. Return whether the lease's references can now be
        dropped.
        """
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
            if lease.slot is not None:
                self._free_slot(lease.slot)
                self._num_slots -= 1
        if over:
            self._holders = +self._holders
        return len(over)


def _ids(tables: Sequence[Sequence[KVCacheBlock]]) -> set[int]:
    return {block.block_id for table in tables for block in table}


# Granting of leases to other engines, which resume requests of this engine.

_SETTLE = 10.0
"""Maximum time in seconds to wait for the end of copies of leased blocks. Copies normally take milliseconds."""
logger = logging.getLogger(__name__)


class LeasedBlocks:
    """Grants leases on the cached blocks of requests. No leases are granted before ``begin`` is called. Only the busy
    loop's thread may call the methods.
    """

    def __init__(
        self, clock: Callable[[], float], new_id: Callable[[], bytes] = lambda: secrets.token_bytes(LEASE_ID_BYTES)
    ) -> None:
        self.leases = Leases(lambda _: None, 0)
        self._clock = clock
        self._new_id = new_id
        self._block_bytes = 0
        self._source: tuple[KVCacheManager, KvSource] | None = None

    def begin(self, leases: Leases, kv_cache: KVCacheManager, identity: KvSource, *, block_bytes: int = 0) -> None:
        """Start granting leases. ``identity`` is the KvSource that identifies this engine, without the fields for one
        lease.
        """
        self.leases, self._source = leases, (kv_cache, identity)
        self._block_bytes = block_bytes

    def grant(self, request: Request) -> KvSource | None:
        """Lease the blocks that another engine needs to resume the request. Return the KvSource with the lease, which
        names this engine as the source of the blocks.

        The lease contains the request's full, findable blocks. In groups with attention windows, the lease contains
        only the blocks to which the next query attends. If the model has recurrent layers, the blocks end where a
        recurrent state is kept, and the lease contains this state as well. The caller may drop the request's own
        references after this call. Return None if there are no such blocks, or if all leases together would have too
        many blocks or states.
        """
        if self._source is None:
            return None
        kv_cache, identity = self._source
        if kv_cache.states is not None:
            kv_cache.states.keep_last(request)
        computed = kv_cache.get_computed_blocks(request)
        if not computed.num_blocks:
            return None
        tables, blocks = _leasable(kv_cache, computed, request)
        states, slot = kv_cache.states, None
        if states is not None:
            block_hash = request.block_hashes[computed.num_blocks - 1]
            if (slot := states.lease(block_hash)) is None:
                return None
            blocks[BlockName(STATE_GROUP, block_hash)] = slot.block_id
        for table in tables:
            kv_cache.pool.touch(table)
        lease = self.leases.grant(self._new_id(), tables, blocks, self._clock(), slot)
        if lease is None:
            for table in tables:
                kv_cache.pool.free(table)
            if states is not None and slot is not None:
                states.free_leased(slot)
            return None
        return msgspec.structs.replace(
            identity, lease_id=lease.lease_id, num_tokens=computed.num_blocks * kv_cache.block_size
        )

    def __len__(self) -> int:
        """Return the number of leases that have references to blocks."""
        return len(self.leases)

    def seconds_to_expiry(self) -> float:
        """Return the seconds until ``expire`` must be called next. The result is negative if the call is overdue, and
        infinite if there are no leases.
        """
        expiry = self.leases.next_expiry()
        return math.inf if expiry is None else expiry - self._clock()

    def expire(self) -> int:
        """End leases whose time has run out. Drop the references of ended leases whose blocks are not being copied.
        Return the number of leases that dropped references.
        """
        return self.leases.expire(self._clock()) if self.leases else 0

    def revoke_one(self) -> bool:
        """End the oldest lease without an open fetch request, to free its blocks. Return False if there is no such
        lease.
        """
        return bool(self.leases) and self.leases.revoke_one()

    def revoke_all(self) -> None:
        """End all leases to free all leased blocks, and wait for the end of copies in flight."""
        if not self.leases.settle(_SETTLE):
            logger.error(
                "copies of KV blocks are still running %g s after the engine ended the leases on these blocks", _SETTLE
            )

    def stats(self, found: PrefixCacheStats) -> KvTransferStats:
        """Return statistics of leases and of tokens found outside the KV cache. ``found`` has the counts of these
        tokens.
        """
        return KvTransferStats(
            external_prefix_cache_queries=found.queries,
            external_prefix_cache_hits=found.hits,
            num_leases=len(self.leases),
            num_leased_blocks=self.leases.num_blocks,
            leased_bytes=self.leases.num_blocks * self._block_bytes,
        )


def _leasable(
    kv_cache: KVCacheManager, computed: ComputedBlocks, request: Request
) -> tuple[list[list[KVCacheBlock]], dict[BlockName, int]]:
    """Return the cached blocks of a request that have memory, as one list per group, and the ids of these blocks by
    name.
    """
    tables: list[list[KVCacheBlock]] = []
    blocks: dict[BlockName, int] = {}
    for group, table in enumerate(computed.blocks):
        if not kv_cache.groups[group].has_memory:
            continue
        for block, block_hash in zip(table, request.block_hashes, strict=False):
            if block is not kv_cache.pool.null_block:
                blocks[BlockName(group, block_hash)] = block.block_id
        tables.append([block for block in table if block is not kv_cache.pool.null_block])
    return tables, blocks
