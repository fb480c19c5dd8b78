"""KV cache layout: the needs of each attention layer, and the layers that share a block table and memory.

Layers share tensors: KV tensor i holds layer i of every group. One group at a time owns a block id, and the other
groups leave that block's part of the tensor alone. A block therefore takes part of as many tensors as the largest group
has layers, and groups of equal size waste nothing. The idea is vLLM's hybrid KV cache manager.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from penstock_enginecore.states.core.spec import StatePoolConfig

DRAFT_PREFIX = "draft."
"""Prefix of the names of layers that belong to a drafter, not to the model."""


def first_key(position: int, sliding_window: int | None, attention_chunk: int | None) -> int:
    """Return the first position that a query at ``position`` sees. The result never decreases as ``position``
    increases.
    """
    first = 0
    if sliding_window is not None:
        first = max(position - sliding_window + 1, 0)
    if attention_chunk is not None:
        first = max(position // attention_chunk * attention_chunk, first)
    return first


class KVCacheSpec(msgspec.Struct, frozen=True, kw_only=True):
    """KV cache needs of one attention layer.

    Attributes:
        dtype_size: Bytes per number.
        sliding_window: Number of keys that a query sees, including its own, or None for full attention.
        attention_chunk: A query at position p sees keys from ``p // attention_chunk * attention_chunk``, in tokens.
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
        """Number of key values per token."""
        return self.num_kv_heads * self.head_size

    @property
    def value_width(self) -> int:
        """Number of value values per token."""
        return self.num_kv_heads * self.head_size_v


class KVCacheGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Layers that share one block table: a block id means the same tokens in each of them.

    Attributes:
        max_blocks: Maximum number of blocks that one request holds here at once, or None for as many as its tokens
            fill.
    """

    layer_names: tuple[str, ...]
    sliding_window: int | None = None
    attention_chunk: int | None = None
    max_blocks: int | None = None

    @property
    def is_windowed(self) -> bool:
        """Whether later queries no longer see the beginning of a sequence."""
        return self.sliding_window is not None or self.attention_chunk is not None

    def first_key(self, position: int) -> int:
        """Return the first position that a query at ``position`` sees in these layers."""
        return first_key(position, self.sliding_window, self.attention_chunk)

    def num_blocks_for(self, num_blocks: int) -> int:
        """Return the maximum number of blocks that a sequence of ``num_blocks`` blocks holds here at once."""
        return num_blocks if self.max_blocks is None else min(num_blocks, self.max_blocks)


class KVCacheConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The size of the block pool. ``num_blocks`` includes block 0, the null block, which is never allocated.

    All groups take their blocks from this pool: a block id belongs to at most one group at a time.

    Attributes:
        states: Size of the state pool, or None for a model without recurrent layers.
    """

    num_blocks: int
    block_size: int
    groups: tuple[KVCacheGroup, ...]
    max_model_len: int
    states: StatePoolConfig | None = None


# Grouping of layers.

MAX_GROUPS = 8
"""Maximum number of groups. Each group costs a block table and an attention plan in every step."""


class KVTensorWidth(NamedTuple):
    """Numbers per token in a KV tensor: the maximum over the layers that share the tensor."""

    key_width: int
    value_width: int


def kv_tensor_widths(specs: Mapping[str, KVCacheSpec], groups: Sequence[KVCacheGroup]) -> list[KVTensorWidth]:
    """Return the width of each KV tensor. Layers with different heads may share a tensor; narrower layers leave the
    rest unused.
    """
    count = max(len(group.layer_names) for group in groups)
    widths = []
    for i in range(count):
        layers = [specs[group.layer_names[i]] for group in groups if i < len(group.layer_names)]
        widths.append(KVTensorWidth(max(s.key_width for s in layers), max(s.value_width for s in layers)))
    return widths


def block_bytes(specs: Mapping[str, KVCacheSpec], groups: Sequence[KVCacheGroup]) -> int:
    """Return the bytes of one block in all KV tensors. The model and the drafter have separate tensors."""
    return sum(_bytes_of(specs, groups, drafts=drafts) for drafts in (False, True))


def _bytes_of(specs: Mapping[str, KVCacheSpec], groups: Sequence[KVCacheGroup], *, drafts: bool) -> int:
    """Return the bytes of one block in the tensors of the drafter, or of the model."""
    own = [
        msgspec.structs.replace(
            group, layer_names=tuple(name for name in group.layer_names if name.startswith(DRAFT_PREFIX) is drafts)
        )
        for group in groups
    ]
    layers = [specs[name] for group in own for name in group.layer_names]
    if not layers:
        return 0
    numbers = sum(width.key_width + width.value_width for width in kv_tensor_widths(specs, own))
    return max(spec.block_size for spec in layers) * max(spec.dtype_size for spec in layers) * numbers


def group_layers(
    specs: Mapping[str, KVCacheSpec], *, max_len: int, max_tokens_in_flight: int
) -> tuple[KVCacheGroup, ...]:
    """Choose the groups that need the least memory for a decoding sequence of ``max_len`` tokens, or of equal choices
    the fewest groups.

    Layers are grouped by kind, which is their window. A kind with many more layers than another is split into groups of
    similar size: four full layers and twenty windowed layers become one group and five. A single group without a window
    is the fallback. The fallback is chosen where windows save nothing, or where layer sizes differ so much that sharing
    tensors costs more than windows save.
    """
    block_size = max(spec.block_size for spec in specs.values())
    kinds: dict[tuple[int | None, int | None], list[str]] = {}
    for name, spec in specs.items():
        kinds.setdefault((_below(spec.sliding_window, max_len), _below(spec.attention_chunk, max_len)), []).append(name)
    best: tuple[KVCacheGroup, ...] = (KVCacheGroup(layer_names=tuple(specs)),)
    best_cost = _cost(specs, best, max_len, block_size)
    for size in range(max(len(names) for names in kinds.values()), 0, -1):
        groups = tuple(
            KVCacheGroup(
                layer_names=tuple(names[i : i + size]),
                sliding_window=window,
                attention_chunk=chunk,
                max_blocks=_max_blocks(window, chunk, max_tokens_in_flight, block_size),
            )
            for (window, chunk), names in kinds.items()
            for i in range(0, len(names), size)
        )
        cost = _cost(specs, groups, max_len, block_size)
        if len(groups) <= MAX_GROUPS and cost < best_cost:
            best, best_cost = groups, cost
    return best


def _below(span: int | None, max_len: int) -> int | None:
    """Return the window, or None if no sequence is long enough to leave it."""
    return None if span is None or span >= max_len else span


def _cost(specs: Mapping[str, KVCacheSpec], groups: Sequence[KVCacheGroup], max_len: int, block_size: int) -> int:
    """Return the bytes that a sequence of ``max_len`` tokens holds while it decodes one token per step."""
    full = -(-max_len // block_size)
    blocks = 0
    for group in groups:
        window = _max_blocks(group.sliding_window, group.attention_chunk, 1, block_size)
        blocks += full if window is None else min(full, window)
    return blocks * block_bytes(specs, groups)


def _max_blocks(window: int | None, chunk: int | None, max_tokens_in_flight: int, block_size: int) -> int | None:
    """Return the number of blocks for the keys that ``max_tokens_in_flight`` consecutive queries see, at any position."""
    spans = [span for span in (window, chunk) if span is not None]
    return -(-(min(spans) - 1 + max_tokens_in_flight) // block_size) + 1 if spans else None
