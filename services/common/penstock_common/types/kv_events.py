"""Changes of an engine's prefix cache, for routers that follow it."""

import msgspec

from penstock_common.types.kv_transfer import KvMedium


class BlockMedia(msgspec.Struct, frozen=True):
    """A medium of which a part lies in a block. ``offset``: where it begins, in positions from the begin of the block; negative
    where that is in a block before.
    """

    identifier: str
    offset: int


class BlockStored(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks that can be found from now on, in a row. ``token_ids``: theirs, concatenated. ``parent_hash``: empty at the
    start of a prompt. ``lora_name``: what the request called its adapter; empty: it had none. ``extra_keys``: the media of each
    block; empty: none has any. Outside the device, and by engines that tell no tokens, only hashes are told, in any order.
    """

    block_hashes: list[bytes]
    parent_hash: bytes
    token_ids: list[int]
    block_size: int
    lora_name: str = ""
    extra_keys: list[list[BlockMedia]] = []
    medium: KvMedium = KvMedium.DEVICE


class BlockRemoved(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks that cannot be found any more."""

    block_hashes: list[bytes]
    medium: KvMedium = KvMedium.DEVICE


class AllBlocksCleared(msgspec.Struct, frozen=True):
    """No block can be found any more."""


KvCacheEvent = BlockStored | BlockRemoved | AllBlocksCleared


def of_device(events: list[KvCacheEvent]) -> list[KvCacheEvent]:
    """Those that tell of blocks in the pool that the model reads, and of nothing else."""
    return [event for event in events if isinstance(event, AllBlocksCleared) or event.medium is KvMedium.DEVICE]
