"""What each attention layer needs from the KV cache, and what it was given."""

import msgspec


class KVCacheSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One attention layer's demand. ``dtype_size`` in bytes. ``sliding_window``: tokens a query sees;
    ``attention_chunk``: a query sees the tokens of its own chunk of so many. Both None for full attention.
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
        return self.block_size * self.num_kv_heads * (self.head_size + self.head_size_v) * self.dtype_size


class KVCacheGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Layers that share one block table: the same block ids mean the same tokens in each of them."""

    layer_names: tuple[str, ...]
    sliding_window: int | None = None


class KVCacheConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The pool after sizing. ``num_blocks`` counts block 0, the null block, which is never handed out."""

    num_blocks: int
    block_size: int
    groups: tuple[KVCacheGroup, ...]
    max_model_len: int
