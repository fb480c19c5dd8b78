"""Keys and values that move between engines and memory tiers, and events of the prefix cache."""

import enum
from typing import NamedTuple

import msgspec

MAX_PARAMS_BYTES = 16 * 1024
"""Maximum size of ``KvParams.params``."""


class KvMedium(enum.IntEnum):
    """Location of a block. Values equal ``penstock.common.v1.KvMedium``."""

    DEVICE = 1
    HOST = 2
    DISK = 3
    PEER = 4
    STATE = 5
    """The state of recurrent layers after a block, without which the block cannot be reused."""


class EngineRole(enum.IntEnum):
    """Preferred use of an engine. Values equal ``penstock.common.v1.EngineRole``."""

    BOTH = 1
    PREFILL = 2
    DECODE = 3


class BlockName(NamedTuple):
    """Content-based name of a block. Engines with equal fingerprints use equal names.

    Attributes:
        group: KV cache group of the block.
        hash: Hash of all tokens up to the block's end.
    """

    group: int
    hash: bytes


class KvGroup(msgspec.Struct, frozen=True):
    """Layers that share a block table. ``window`` is the number of tokens that a query attends to; 0 means all."""

    layers: tuple[str, ...]
    window: int = 0


class KvLayout(msgspec.Struct, frozen=True, kw_only=True):
    """Layout of blocks. Both ends of a transfer must agree on all fields except ``numerics``.

    Attributes:
        order: Order of the numbers in a block, as the attention backend names it.
        shard: Index of this shard among ``num_shards``.
        numerics: Kernels and instructions. If they are equal, tokens are bit-identical.
        fingerprint: 16 bytes that identify the weights and all fields except numerics.
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
    """An engine that keeps the blocks of a request's first ``num_tokens`` tokens under a lease, for an engine that
    resumes the request.

    Attributes:
        address: host:port of its transfer service.
        lease_id: 16 bytes.
    """

    engine_id: str
    incarnation: str
    address: str
    lease_id: bytes
    num_tokens: int
    fingerprint: bytes


class KvParams(msgspec.Struct, frozen=True, omit_defaults=True):
    """Gateway settings for a request's KV blocks.

    Attributes:
        lease: Whether the engine keeps the KV blocks for a while after the request ends.
        source: Engine that keeps the KV blocks of the request that this request continues, or None.
        params: JSON object for the engines' own connector, or empty.
    """

    lease: bool = False
    source: KvSource | None = None
    params: str = ""


# Changes of an engine's prefix cache, for routers that track it.


class BlockMedia(msgspec.Struct, frozen=True):
    """Media item that overlaps a block. ``offset`` is the item's start relative to the block's start, in positions. The
    offset is negative if the item starts in an earlier block.
    """

    identifier: str
    offset: int


class BlockStored(msgspec.Struct, frozen=True, kw_only=True):
    """Event: consecutive blocks can be found from now on.

    For blocks outside the device, and for engines that report no tokens, only hashes are reported, in any order.

    Attributes:
        parent_hash: Hash of the previous block. Empty at the start of a prompt.
        token_ids: Tokens of the blocks, concatenated.
        lora_name: Name of the adapter in the request, or empty.
        extra_keys: Media of each block. Empty if no block has media.
    """

    block_hashes: list[bytes]
    parent_hash: bytes
    token_ids: list[int]
    block_size: int
    lora_name: str = ""
    extra_keys: list[list[BlockMedia]] = []
    medium: KvMedium = KvMedium.DEVICE


class BlockRemoved(msgspec.Struct, frozen=True, kw_only=True):
    """Event: blocks cannot be found any more."""

    block_hashes: list[bytes]
    medium: KvMedium = KvMedium.DEVICE


class AllBlocksCleared(msgspec.Struct, frozen=True):
    """Event: all blocks were removed from the cache."""


KvCacheEvent = BlockStored | BlockRemoved | AllBlocksCleared


def of_device(events: list[KvCacheEvent]) -> list[KvCacheEvent]:
    """Return the events that concern only blocks in device memory."""
    return [event for event in events if isinstance(event, AllBlocksCleared) or event.medium is KvMedium.DEVICE]
