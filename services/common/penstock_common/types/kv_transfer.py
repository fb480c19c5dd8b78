"""Keys and values that move between engines, and between an engine's memories."""

import enum
from typing import NamedTuple

import msgspec

MAX_PARAMS_BYTES = 16 * 1024
"""Of ``kv_transfer_params`` as JSON."""


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
