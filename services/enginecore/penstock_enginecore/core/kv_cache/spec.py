"""KV cache layout: the needs of each attention layer, and the layers that share a block table and memory.

Layers share tensors: KV tensor i stores the keys and values of layer i of every group. A block id belongs to one group
at a time, and the layers of other groups do not use the block with this id. The number of tensors is therefore the
number of layers in the largest group, and groups of equal size waste no memory. The idea is vLLM's hybrid KV cache
manager.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from penstock_enginecore.states.core.spec import StatePoolConfig

DRAFT_PREFIX = "draft."
"""Prefix of the names of layers that belong to a drafter, not to the model."""


def first_key(position: int, sliding_window: int | None, attention_chunk: int | None) -> int:
    """Return the first position to which a query at ``position`` attends. The result never decreases when ``position``
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
        head_size_v: Number of elements of a head's value. 0 if the layer caches latents (MLA): one row per token, which
            is the key of all heads, and whose first elements are the value.
        dtype_size: Size in bytes of one element of the keys and values.
        sliding_window: Number of keys to which a query attends, including its own key. None for full attention.
        attention_chunk: Size of an attention chunk in tokens. A query at position p attends to keys from position ``p
            // attention_chunk * attention_chunk``. None for full attention.
        first_position: The layer stores no keys and values of positions before this one.
        end_position: The layer stores no keys and values from this position on. None if there is no end. A layer with
            such a limit, or with a ``first_position``, has no sliding window and no attention chunks.
    """

    block_size: int
    num_kv_heads: int
    head_size: int
    head_size_v: int
    dtype_size: int
    sliding_window: int | None = None
    attention_chunk: int | None = None
    first_position: int = 0
    end_position: int | None = None

    @property
    def block_limits(self) -> tuple[int, int | None]:
        """Index of the first block in which the layer stores keys and values, and the index after the last such block
        or None.
        """
        size, end = self.block_size, self.end_position
        return self.first_position // size, None if end is None else -(-end // size)

    @property
    def keeps_latents(self) -> bool:
        """Whether the layer caches latents instead of keys and values."""
        return self.head_size_v == 0

    @property
    def page_size_bytes(self) -> int:
        """Size in bytes of one block of this layer, with its keys and values."""
        return self.block_size * (self.key_width + self.value_width) * self.dtype_size

    @property
    def key_width(self) -> int:
        """Number of elements per token in the layer's keys."""
        return self.num_kv_heads * self.head_size

    @property
    def value_width(self) -> int:
        """Number of elements per token in the layer's values."""
        return self.num_kv_heads * self.head_size_v


class KVCacheGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Layers that share one block table: in each of these layers, a block stores the same tokens.

    Attributes:
        max_blocks: Maximum number of blocks that one request uses in this group at the same time. None if only the
            number of tokens limits it.
        first_block: The group has no blocks before this index of a block table.
        end_block: The group has no blocks from this index of a block table on. None if there is no such limit. At
            indices without a block, block tables have the null block.
    """

    layer_names: tuple[str, ...]
    sliding_window: int | None = None
    attention_chunk: int | None = None
    max_blocks: int | None = None
    first_block: int = 0
    end_block: int | None = None

    @property
    def has_memory(self) -> bool:
        """Whether the group's blocks have memory. The blocks of a model without attention have no memory and only carry
        the hashes of prefixes.
        """
        return bool(self.layer_names)

    @property
    def is_windowed(self) -> bool:
        """Whether later queries no longer attend to the beginning of a sequence."""
        return self.sliding_window is not None or self.attention_chunk is not None

    def first_key(self, position: int) -> int:
        """Return the first position to which a query at ``position`` attends in these layers."""
        return first_key(position, self.sliding_window, self.attention_chunk)

    def indices(self, start: int, end: int) -> range:
        """Return the indices from ``start`` to before ``end`` of a block table at which this group has blocks."""
        return range(max(start, self.first_block), end if self.end_block is None else min(end, self.end_block))

    def num_blocks_for(self, num_blocks: int) -> int:
        """Return the maximum number of blocks that a sequence of ``num_blocks`` blocks uses in this group at the same
        time.
        """
        count = len(self.indices(0, num_blocks))
        return count if self.max_blocks is None else min(count, self.max_blocks)


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
"""Maximum number of KV cache groups. Each group needs a block table and an attention plan in every step."""


class KVTensorWidth(NamedTuple):
    """Number of elements per token in a KV tensor: the maximum over the layers that share the tensor."""

    key_width: int
    value_width: int


def kv_tensor_widths(specs: Mapping[str, KVCacheSpec], groups: Sequence[KVCacheGroup]) -> list[KVTensorWidth]:
    """Return the width of each KV tensor. Layers with different numbers or sizes of heads may share a tensor. Narrower
    layers leave part of the tensor unused.
    """
    count = max(len(group.layer_names) for group in groups)
    widths = []
    for i in range(count):
        layers = [specs[group.layer_names[i]] for group in groups if i < len(group.layer_names)]
        widths.append(KVTensorWidth(max(s.key_width for s in layers), max(s.value_width for s in layers)))
    return widths


def block_bytes(specs: Mapping[str, KVCacheSpec], groups: Sequence[KVCacheGroup]) -> int:
    """Return the size in bytes of one block in all KV tensors together. The model and the drafter have separate
    tensors.
    """
    return sum(_bytes_of(specs, groups, drafts=drafts) for drafts in (False, True))


def _bytes_of(specs: Mapping[str, KVCacheSpec], groups: Sequence[KVCacheGroup], *, drafts: bool) -> int:
    """Return the size in bytes of one block in all KV tensors of the drafter if ``drafts`` is true, or of the model."""
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
    """Divide the layers into the groups that need the least memory for a decoding sequence of ``max_len`` tokens. Among
    choices that need equal memory, choose the one with the fewest groups.

    Layers in a group have the same attention window, and store keys and values in the same blocks of a sequence. If
    many more layers have one window than another, the layers with the more frequent window are split into groups of
    similar size. For example, four layers with full attention become one group, and twenty windowed layers become five
    groups. The fallback is a single group that stores all positions and has no window. The fallback is chosen if
    separate groups save no memory. It is also chosen if layer sizes differ so much that sharing tensors costs more
    memory than separate groups save.
    """
    block_size = max(spec.block_size for spec in specs.values())
    kinds: dict[tuple[int | None, int | None, tuple[int, int | None]], list[str]] = {}
    for name, spec in specs.items():
        spans = _below(spec.sliding_window, max_len), _below(spec.attention_chunk, max_len)
        kinds.setdefault((*spans, spec.block_limits), []).append(name)
    best: tuple[KVCacheGroup, ...] = (KVCacheGroup(layer_names=tuple(specs)),)
    best_cost = _cost(specs, best, max_len, block_size)
    for size in range(max(len(names) for names in kinds.values()), 0, -1):
        groups = tuple(
            KVCacheGroup(
                layer_names=tuple(names[i : i + size]),
                sliding_window=window,
                attention_chunk=chunk,
                max_blocks=_max_blocks(window, chunk, max_tokens_in_flight, block_size),
                first_block=first,
                end_block=end,
            )
            for (window, chunk, (first, end)), names in kinds.items()
            for i in range(0, len(names), size)
        )
        cost = _cost(specs, groups, max_len, block_size)
        if len(groups) <= MAX_GROUPS and cost < best_cost:
            best, best_cost = groups, cost
    return best


def _below(span: int | None, max_len: int) -> int | None:
    """Return the attention window ``span``, or None if no sequence of ``max_len`` tokens is longer than the window."""
    return None if span is None or span >= max_len else span


def _cost(specs: Mapping[str, KVCacheSpec], groups: Sequence[KVCacheGroup], max_len: int, block_size: int) -> int:
    """Return the size in bytes of the KV cache blocks that a sequence of ``max_len`` tokens uses while it decodes one
    token per step.
    """
    full = -(-max_len // block_size)
    blocks = 0
    for group in groups:
        window = _max_blocks(group.sliding_window, group.attention_chunk, 1, block_size)
        stored = len(group.indices(0, full))
        blocks += stored if window is None else min(stored, window)
    return blocks * block_bytes(specs, groups)


def _max_blocks(window: int | None, chunk: int | None, max_tokens_in_flight: int, block_size: int) -> int | None:
    """Return the maximum number of blocks with keys to which ``max_tokens_in_flight`` consecutive queries attend."""
    spans = [span for span in (window, chunk) if span is not None]
    return -(-(min(spans) - 1 + max_tokens_in_flight) // block_size) + 1 if spans else None
