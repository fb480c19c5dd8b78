"""What each attention layer needs from the KV cache, and what it was given."""

import msgspec

DRAFT_PREFIX = "draft."
"""What the names of layers begin with that belong to what drafts, not to the model."""


def first_key(position: int, sliding_window: int | None, attention_chunk: int | None) -> int:
    """The first position that a query at ``position`` sees. It never falls as ``position`` rises."""
    first = 0
    if sliding_window is not None:
        first = max(position - sliding_window + 1, 0)
    if attention_chunk is not None:
        first = max(position // attention_chunk * attention_chunk, first)
    return first


class KVCacheSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One attention layer's demand. ``dtype_size`` in bytes. ``sliding_window``: keys a query sees, itself included.
    ``attention_chunk``: a query at position p sees keys from ``p // attention_chunk * attention_chunk``. Both in tokens,
    None for full attention.
    """

    block_size: int
    num_kv_heads: int
    head_size: int
    head_size_v: int
    dtype_size: int
    sliding_window: int | None = None
    attention_chunk: int | None = None

    @property
    def page_size_bytes(self) -> int:
        """Bytes of one block of this layer, keys and values."""
        return self.block_size * (self.key_width + self.value_width) * self.dtype_size

    @property
    def key_width(self) -> int:
        """Numbers that the keys of a token take."""
        return self.num_kv_heads * self.head_size

    @property
    def value_width(self) -> int:
        """Numbers that the values of a token take."""
        return self.num_kv_heads * self.head_size_v


class KVCacheGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Layers that share one block table: the same block ids mean the same tokens in each of them.

    ``max_blocks``: the most blocks one request holds here at once; None: as many as its tokens fill.
    """

    layer_names: tuple[str, ...]
    sliding_window: int | None = None
    attention_chunk: int | None = None
    max_blocks: int | None = None

    @property
    def is_windowed(self) -> bool:
        """Whether later queries stop seeing the beginning of a sequence."""
        return self.sliding_window is not None or self.attention_chunk is not None

    def first_key(self, position: int) -> int:
        """The first position that a query at ``position`` sees in these layers."""
        return first_key(position, self.sliding_window, self.attention_chunk)

    def num_blocks_for(self, num_blocks: int) -> int:
        """The most blocks that a sequence filling ``num_blocks`` blocks holds here at once."""
        return num_blocks if self.max_blocks is None else min(num_blocks, self.max_blocks)


class KVCacheConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The pool after sizing. ``num_blocks`` counts block 0, the null block, which is never handed out.

    All groups take their blocks from this one pool: a block id belongs to at most one group at a time.
    """

    num_blocks: int
    block_size: int
    groups: tuple[KVCacheGroup, ...]
    max_model_len: int
