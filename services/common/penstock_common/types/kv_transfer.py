"""Types for the transfer of KV blocks between engines and memory tiers, and events of the prefix cache."""

import enum
from typing import NamedTuple

import msgspec

MAX_PARAMS_BYTES = 16 * 1024
"""Maximum size of ``KvParams.params`` in bytes."""


class KvMedium(enum.IntEnum):
    """Medium on which a block is stored. Values equal ``penstock.common.v1.KvMedium``."""

    DEVICE = 1
    HOST = 2
    DISK = 3
    PEER = 4
    STATE = 5
    """The state of recurrent layers after a block, on any medium. The block cannot be reused without this state."""


class EngineRole(enum.IntEnum):
    """Phase for which frontends prefer an engine: prefill, decode or both. Values equal
    ``penstock.common.v1.EngineRole``.
    """

    BOTH = 1
    PREFILL = 2
    DECODE = 3


STATE_GROUP = 0xFFFF
"""Value of ``BlockName.group`` for a state of recurrent layers. The numbers of KV cache groups are smaller."""


class BlockName(NamedTuple):
    """Name of a block, or of the state after a block, derived from the content of the block. Engines with equal
    fingerprints use the same names.

    Attributes:
        group: KV cache group of the block, or ``STATE_GROUP``.
        hash: Hash of all tokens up to the block's end.
    """

    group: int
    hash: bytes


class KvGroup(msgspec.Struct, frozen=True):
    """Layers that share a block table. ``window`` is the number of tokens that a query attends to; 0 means all."""

    layers: tuple[str, ...]
    window: int = 0


class KvLayout(msgspec.Struct, frozen=True, kw_only=True):
    """Layout of KV blocks in memory. On both ends of a transfer, all fields except ``numerics`` must be equal.

    Attributes:
        order: Name of the memory order of the numbers in a block. The attention backend defines the name.
        shard: Index of this shard among ``num_shards``.
        numerics: Kernels and CPU instructions in use. Engines with equal values compute bit-identical results.
        fingerprint: 16 bytes that identify the weights and all fields except numerics.
        states: Description of a state of recurrent layers: span, and names, shapes and element types of all parts. Empty
            for a model without recurrent layers.
    """

    dtype: str
    block_size: int
    groups: tuple[KvGroup, ...]
    order: str
    shard: int = 0
    num_shards: int = 1
    numerics: str = ""
    fingerprint: bytes = b""
    states: str = ""


class KvSource(msgspec.Struct, frozen=True, kw_only=True):
    """An engine that keeps blocks of a request under a lease, for another engine that resumes the request.

    The blocks are those of the request's first ``num_tokens`` tokens.

    Attributes:
        address: Address (host:port) of the engine's transfer service.
        lease_id: 16 bytes.
    """

    engine_id: str
    incarnation: str
    address: str
    lease_id: bytes
    num_tokens: int
    fingerprint: bytes


class KvParams(msgspec.Struct, frozen=True, omit_defaults=True):
    """Settings of a gateway for the KV blocks of a request.

    Attributes:
        lease: Whether the engine keeps the KV blocks under a lease after the request ends.
        source: Engine with the KV blocks of an earlier request, which this request continues, or None.
        params: JSON object for the KV connector of a plugin, or empty.
    """

    lease: bool = False
    source: KvSource | None = None
    params: str = ""


# Changes of an engine's prefix cache, for routers that track it.


class BlockMedia(msgspec.Struct, frozen=True):
    """Media item that overlaps a block.

    ``offset`` is the item's start relative to the block's start, in positions. The offset is negative if the item
    starts in an earlier block.
    """

    identifier: str
    offset: int


class BlockStored(msgspec.Struct, frozen=True, kw_only=True):
    """Event: consecutive blocks were added to the prefix cache.

    For blocks on other media than the device, or if the engine reports no tokens, the event has only hashes, in any
    order.

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
    """Event: blocks were removed from the prefix cache."""

    block_hashes: list[bytes]
    medium: KvMedium = KvMedium.DEVICE


class AllBlocksCleared(msgspec.Struct, frozen=True):
    """Event: all blocks were removed from the prefix cache."""


KvCacheEvent = BlockStored | BlockRemoved | AllBlocksCleared


def of_device(events: list[KvCacheEvent]) -> list[KvCacheEvent]:
    """Return the events about blocks in device memory."""
    return [event for event in events if isinstance(event, AllBlocksCleared) or event.medium is KvMedium.DEVICE]
