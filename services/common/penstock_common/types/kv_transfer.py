"""Keys and values that move between engines and memories, and events of the prefix cache."""

import enum
from typing import NamedTuple

import msgspec

MAX_PARAMS_BYTES = 16 * 1024
"""Of ``KvParams.params``."""


class KvMedium(enum.IntEnum):
    """Where a block is. Values equal ``penstock.common.v1.KvMedium``."""

    DEVICE = 1
    HOST = 2
    DISK = 3
    PEER = 4


class EngineRole(enum.IntEnum):
    """What an engine is preferred for. Values equal ``penstock.common.v1.EngineRole``."""

    BOTH = 1
    PREFILL = 2
    DECODE = 3


class BlockName(NamedTuple):
    """A block by its content: the same at all engines of one fingerprint. ``group``: whose keys and values it has; ``hash``: of
    all tokens up to its end.
    """

    group: int
    hash: bytes


class KvGroup(msgspec.Struct, frozen=True):
    """Layers that share a block table, and the tokens that a query of them sees; 0: all."""

    layers: tuple[str, ...]
    window: int = 0


class KvLayout(msgspec.Struct, frozen=True, kw_only=True):
    """What must be the same at both ends so that a block of one means the same to the other, but ``numerics``: kernels and
    instructions, where these are equal, tokens are bit for bit. ``order``: how numbers lie in a block, as the attention backend
    names it. ``shard``: of ``num_shards``. ``fingerprint``: 16 bytes, of all but numerics and of the weights.
    """

    dtype: str
    block_size: int
    groups: tuple[KvGroup, ...]
    order: str
    shard: int = 0
    num_shards: int = 1
    numerics: str = ""
    fingerprint: bytes = b""


class KvSource(msgspec.Struct, frozen=True, kw_only=True):
    """An engine that keeps the blocks of a request's first ``num_tokens`` tokens for whoever goes on with it, under a lease (16
    bytes). ``address``: host:port of its transfer service.
    """

    engine_id: str
    incarnation: str
    address: str
    lease_id: bytes
    num_tokens: int
    fingerprint: bytes


class KvParams(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a gateway says of a request's keys and values. ``lease``: they are kept for a while when the request ends; ``source``:
    who keeps those of the request that this one goes on with. ``params``: what engines' own connector is told, a JSON object.
    """

    lease: bool = False
    source: KvSource | None = None
    params: str = ""


# Changes of an engine's prefix cache, for routers that follow it.


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
