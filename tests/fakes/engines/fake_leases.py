"""Lease manager that keeps blocks of handed-over requests and never sends them to an engine."""

import math

from penstock_common.types.kv_transfer import KvSource
from penstock_common.types.outputs import KvTransferStats
from penstock_enginecore.core.engine_core import EngineCore
from penstock_enginecore.core.kv_cache.block_pool import KVCacheBlock
from penstock_enginecore.core.kv_cache.manager import PrefixCacheStats
from penstock_enginecore.core.request import Request
from tests.fakes.engines.engine_harness import FakeClock

FINGERPRINT = b"f" * 16


class FakeLeases:
    """Fake lease manager. ``refuses``: it keeps no blocks. ``blocks``: blocks that each lease keeps."""

    def __init__(self, engine: EngineCore, clock: FakeClock, seconds: float = 5.0) -> None:
        engine.leases = engine.scheduler._state.leases = self
        self._manager = engine.scheduler.kv_cache  # type: ignore[attr-defined]
        self._clock = clock
        self._seconds = seconds
        self._ends: dict[bytes, float] = {}
        self.blocks: dict[bytes, list[KVCacheBlock]] = {}
        self.refuses = False

    def grant(self, request: Request) -> KvSource | None:
        full = request.num_processed_tokens // self._manager.block_size
        kept = [block for table in self._manager._blocks[request.key] for block in table[:full] if block.ref_count]
        if self.refuses or not kept:
            return None
        self._manager.pool.touch(kept)
        lease_id = len(self.blocks).to_bytes(16, "big")
        self.blocks[lease_id] = kept
        self._ends[lease_id] = self._clock.now + self._seconds
        return KvSource(
            engine_id="engine",
            incarnation="1",
            address="h:1",
            lease_id=lease_id,
            num_tokens=full * self._manager.block_size,
            fingerprint=FINGERPRINT,
        )

    def __len__(self) -> int:
        return len(self._ends)

    def seconds_to_expiry(self) -> float:
        return min(self._ends.values(), default=math.inf) - self._clock.now

    def expire(self) -> int:
        over = [lease_id for lease_id, end in self._ends.items() if end <= self._clock.now]
        for lease_id in over:
            self.end(lease_id)
        return len(over)

    def revoke_one(self) -> bool:
        return False

    def stats(self, found: PrefixCacheStats) -> KvTransferStats:
        return KvTransferStats(num_leases=len(self._ends))

    def revoke_all(self) -> None:
        for lease_id in list(self._ends):
            self.end(lease_id)

    def end(self, lease_id: bytes) -> None:
        """End a lease that was released."""
        del self._ends[lease_id]
        self._manager.pool.free(self.blocks.pop(lease_id))
