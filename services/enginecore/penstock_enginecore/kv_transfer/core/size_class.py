"""Host memory and disk tiers for blocks of one size. A size class contains either KV blocks or states of recurrent
layers.
"""

from collections.abc import Callable
from dataclasses import dataclass

from penstock_common.types.kv_transfer import BlockName, KvMedium
from penstock_enginecore.kv_transfer.core.base import BlockCopier, BlockHolder, Follow
from penstock_enginecore.kv_transfer.core.host_disk_tiers import BlockStore, DiskTier, HostTier
from penstock_enginecore.kv_transfer.core.transfer_stats import LoadRates


@dataclass(frozen=True, slots=True)
class TierStats:
    """Statistics of the tiers for blocks of one size (KV blocks, or states of recurrent layers). Counts are since the
    engine started.

    Attributes:
        host_usage: Fraction of host memory slots in use, in [0, 1]. None without a host memory tier.
        disk_usage: Fraction of disk slots in use, in [0, 1]. None without a disk tier.
        num_saved_blocks: Number of blocks that were saved to host memory.
        num_written_blocks: Number of blocks that were written to the disk.
        num_loaded_blocks: Number of blocks that were loaded from each medium.
        block_bytes: Size of a block in bytes.
    """

    host_usage: float | None
    disk_usage: float | None
    num_saved_blocks: int
    num_written_blocks: int
    num_loaded_blocks: dict[KvMedium, int]
    block_bytes: int


@dataclass(frozen=True, slots=True)
class TierPlan:
    """Plan for the tiers for blocks of one size: KV blocks, or states of recurrent layers.

    Attributes:
        copier: Copier of these blocks.
        num_host_slots: Number of blocks that fit into the host memory tier. 0 means no host memory tier.
        store: File on the disk for blocks evicted from host memory, or None without a disk tier.
    """

    copier: BlockCopier
    num_host_slots: int
    store: BlockStore | None = None


class SizeClass:
    """Host memory and disk tiers for blocks of one size."""

    def __init__(self, plan: TierPlan, blocks: BlockHolder, follow: Follow, clock: Callable[[], float]) -> None:
        self.copier = plan.copier
        self.host: HostTier | None = None
        self.disk: DiskTier | None = None
        self.rates = LoadRates()
        self.num_loaded = dict.fromkeys(KvMedium, 0)
        if plan.num_host_slots:
            keep = None
            if plan.store is not None:
                self.disk = DiskTier(plan.store, plan.copier, blocks, follow, clock)
                keep = self.disk.keep
            self.host = HostTier(plan.copier, plan.num_host_slots, blocks, follow, keep)

    def where(self, name: BlockName) -> KvMedium | None:
        """Return the medium of the fastest of this engine's tiers that has a block, or None."""
        if self.host is not None and name in self.host.index:
            return KvMedium.HOST
        if self.disk is not None and name in self.disk.index:
            return KvMedium.DISK
        return None

    def stats(self) -> TierStats:
        """Return the statistics of the tiers. Thread-safe."""
        host, disk = self.host, self.disk
        return TierStats(
            host_usage=None if host is None else host.usage,
            disk_usage=None if disk is None else disk.usage,
            num_saved_blocks=0 if host is None else host.num_saved,
            num_written_blocks=0 if disk is None else disk.num_written,
            num_loaded_blocks=dict(self.num_loaded),
            block_bytes=self.copier.block_bytes,
        )
