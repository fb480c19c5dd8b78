"""Blocks that the engine keeps for whoever goes on with a request that it has handed over."""

import enum
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from penstock_common.types.kv_transfer import BlockName
from penstock_enginecore.core.kv_cache.block_pool import KVCacheBlock

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
        """Whether the blocks were given back."""
        return self not in (LeaseState.GRANTED, LeaseState.OPEN)


class Lease:
    """One reference to each block of ``tables``. ``names``: of their content. ``num_pulls``: streams that have it open;
    ``num_fetches``: of these, unanswered ones. Times are in the clock's seconds: at ``expires_at`` it ends without a pull, at
    ``ends_by`` in any case.
    """

    __slots__ = (
        "ends_by",
        "expires_at",
        "lease_id",
        "names",
        "num_fetches",
        "num_pulls",
        "num_tokens",
        "state",
        "tables",
    )

    def __init__(
        self,
        lease_id: bytes,
        tables: Sequence[Sequence[KVCacheBlock]],
        names: Iterable[BlockName],
        num_tokens: int,
        *,
        expires_at: float,
        ends_by: float,
    ) -> None:
        self.lease_id = lease_id
        self.tables = tables
        self.names = frozenset(names)
        self.num_tokens = num_tokens
        self.state = LeaseState.GRANTED
        self.num_pulls = 0
        self.num_fetches = 0
        self.expires_at = expires_at
        self.ends_by = ends_by

    @property
    def clock_ends(self) -> float:
        """When it ends unless something happens."""
        return self.ends_by if self.num_pulls else min(self.expires_at, self.ends_by)


class Leases:
    """Those of an engine, oldest first. Each is granted once and ends once, and gives its references back then; what is told of
    one that has ended, or never was, changes nothing.

    All calls come from the thread of the busy loop, with its clock's ``now``. Whoever reads a block while it is sent has a
    reference of its own.
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
        self._leases: dict[bytes, Lease] = {}
        self._holders: Counter[int] = Counter()
        """By block id, the leases that have it."""
        self.ends: Counter[LeaseState] = Counter()
        """Leases that have ended, by how."""
        self.num_refused = 0

    def __len__(self) -> int:
        """Leases that have not ended."""
        return len(self._leases)

    def __contains__(self, lease_id: bytes) -> bool:
        return lease_id in self._leases

    @property
    def num_blocks(self) -> int:
        """Blocks that leases have, each counted once."""
        return len(self._holders)

    def get(self, lease_id: bytes) -> Lease | None:
        """The lease, unless it has ended."""
        return self._leases.get(lease_id)

    def grant(
        self,
        lease_id: bytes,
        tables: Sequence[Sequence[KVCacheBlock]],
        names: Iterable[BlockName],
        num_tokens: int,
        now: float,
    ) -> Lease | None:
        """Take over the caller's references to the blocks of ``tables``, those of a request's first ``num_tokens`` tokens without
        null blocks. ``names``: what their content is. None where leases would have too many blocks: then the caller keeps its
        references. Raises ValueError for an id that is in use.
        """
        if lease_id in self._leases:
            raise ValueError(f"lease {lease_id.hex()} is there already")
        ids = {block.block_id for table in tables for block in table}
        if len(ids | self._holders.keys()) > self._max_blocks:
            self.num_refused += 1
            return None
        lease = Lease(
            lease_id,
            tables,
            names,
            num_tokens,
            expires_at=now + self.lease_seconds,
            ends_by=now + self._max_seconds,
        )
        self._leases[lease_id] = lease
        self._holders.update(ids)
        return lease

    def opened(self, lease_id: bytes) -> Lease | None:
        """A pull of it is open from now on; None where there is no such lease."""
        lease = self._leases.get(lease_id)
        if lease is not None:
            lease.num_pulls += 1
            lease.state = LeaseState.OPEN
        return lease

    def closed(self, lease_id: bytes, now: float) -> None:
        """A pull that was opened is not any more."""
        lease = self._leases.get(lease_id)
        if lease is not None:
            lease.num_pulls -= 1
            if not lease.num_pulls:
                lease.state = LeaseState.GRANTED
                lease.expires_at = now + self.lease_seconds

    def fetch_began(self, lease_id: bytes) -> None:
        """A pull of it reads blocks: it is not revoked to make room."""
        if (lease := self._leases.get(lease_id)) is not None:
            lease.num_fetches += 1

    def fetch_ended(self, lease_id: bytes) -> None:
        """A pull has what it asked for, or its stream is over."""
        if (lease := self._leases.get(lease_id)) is not None:
            lease.num_fetches -= 1

    def released(self, lease_id: bytes) -> None:
        """Whoever pulled needs it no more."""
        if (lease := self._leases.get(lease_id)) is not None:
            self._end(lease, LeaseState.RELEASED)

    def expire(self, now: float) -> int:
        """End those whose clock has run out. Returns how many."""
        over = [lease for lease in self._leases.values() if lease.clock_ends <= now]
        for lease in over:
            self._end(lease, LeaseState.EXPIRED)
        return len(over)

    def next_expiry(self) -> float:
        """When ``expire`` has something to do next; infinity without leases."""
        return min((lease.clock_ends for lease in self._leases.values()), default=math.inf)

    def revoke_one(self) -> bool:
        """To make room: end the oldest that nothing is read from. False where there is none."""
        for lease in self._leases.values():
            if not lease.num_fetches:
                self._end(lease, LeaseState.REVOKED)
                return True
        return False

    def revoke_all(self) -> None:
        """The pool is to be empty: end all."""
        for lease in list(self._leases.values()):
            self._end(lease, LeaseState.REVOKED)

    def _end(self, lease: Lease, state: LeaseState) -> None:
        del self._leases[lease.lease_id]
        lease.state = state
        self.ends[state] += 1
        for block_id in {block.block_id for table in lease.tables for block in table}:
            self._holders[block_id] -= 1
            if not self._holders[block_id]:
                del self._holders[block_id]
        for table in lease.tables:
            self._free(table)
