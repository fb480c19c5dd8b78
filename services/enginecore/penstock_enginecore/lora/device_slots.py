"""Slots of device memory for adapters: their layout, their assignment to adapters, and adapters in this layout."""

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import numpy.typing as npt
import torch

from penstock_common.memory import in_units
from penstock_enginecore.attention.base import IntArray
from penstock_enginecore.lora.adapter import LoraAdapter, LoraSegment, LowRankUpdate, expect_features
from penstock_enginecore.lora.slot_copies import Pairs
from penstock_enginecore.models.errors import ModelLoadError

# Inputs of the kernels that add adapters to a matrix product: the positions of the adapters' matrices in the slots, and
# tiles of the rows (tokens) that have adapters.

# A slot is one contiguous piece of memory for all matrices of an adapter. ``max_lora_rank`` determines the slot size.
# An adapter with smaller ranks fills only a part of its slot. Two copies transfer an adapter to the device: one for the
# matrices, and one for the table of matrix offsets.

ALIGNED = 16
"""Alignment of a matrix, in elements. Rows of B are aligned to half as many elements. Kernels need this alignment to
load several elements at a time.
"""
ROW_ALIGNED = 8
PIECE = 128
"""Number of output features in a piece. One kernel program computes one piece. All features of a piece belong to one
projection.
"""
_CHUNK = 1024
_MOST_CHUNKS = 8
_STEP = 128


@dataclass(frozen=True, slots=True)
class ProductShape:
    """Shape of a matrix product that computes several projections of the same input ``[rows, in_features]``. The
    outputs of the projections are concatenated; ``features`` has the number of output features of each projection.

    For each projection, an adapter has one A and one B, or no update.
    """

    in_features: int
    features: tuple[int, ...]

    @property
    def columns(self) -> int:
        """Number of columns of the table. The columns contain:

        - the offset of A,
        - the offset of each projection's B,
        - the first row of each projection in A, and the end of the last projection in A.
        """
        return 2 * len(self.features) + 2

    @property
    def chunk(self) -> int:
        """Number of columns of A that one kernel program processes. The number is the same in all steps. If A has more
        columns, the sums of the chunks are added in order.
        """
        whole = -(-self.in_features // (_MOST_CHUNKS * _STEP)) * _STEP
        return max(_CHUNK, whole)

    @property
    def chunks(self) -> int:
        """Number of chunks."""
        return -(-self.in_features // self.chunk)

    def numbers(self, ranks: Sequence[int]) -> int:
        """Return the number of elements that an adapter's matrices need. ``ranks`` has the rank of each projection's
        update, or 0 if the projection has no update.
        """
        of_b = [_whole(features * row_stride(rank)) for features, rank in zip(self.features, ranks, strict=True)]
        return _whole(sum(ranks) * self.in_features) + sum(of_b)

    def pieces(self) -> npt.NDArray[np.int32]:
        """Return int32 ``[pieces, 4]``. The columns are: projection of the piece, first feature of the piece, first
        feature of the projection, and end of the projection.
        """
        starts = [0, *accumulate(self.features)]
        found = [
            (part, first, starts[part], starts[part + 1])
            for part in range(len(self.features))
            for first in range(starts[part], starts[part + 1], PIECE)
        ]
        return np.array(found, dtype=np.int32)


@dataclass(frozen=True, slots=True)
class SlotMatrices:
    """Matrices of one product in all slots, on the device.

    Attributes:
        numbers: ``[slots, elements per slot]``: the complete memory of the slots, including the matrices of all other
            products.
        table: int64 ``[slots, columns]``, see ``ProductShape``.
        pieces: int32 ``[pieces, 4]``, see ``ProductShape.pieces``.
        max_rank: Largest rank of a projection.
    """

    shape: ProductShape
    numbers: torch.Tensor
    table: torch.Tensor
    pieces: torch.Tensor
    max_rank: int

    @property
    def most_ranks(self) -> int:
        """Maximum number of rows that A can have."""
        return len(self.shape.features) * self.max_rank

    def scratch_numbers(self, tiles: int, tile_rows: int) -> int:
        """Return the number of float32 values that the first kernel passes to the second, for ``tiles`` tiles."""
        return self.shape.chunks * tiles * tile_rows * self.most_ranks


def row_stride(rank: int) -> int:
    """Return the distance between two rows of a B matrix of rank ``rank``, in elements."""
    return -(-rank // ROW_ALIGNED) * ROW_ALIGNED


def pack(
    shape: ProductShape, updates: Sequence[LowRankUpdate | None], memory: torch.Tensor, start: int, table: IntArray
) -> int:
    """Write the matrices of ``updates`` to ``memory`` and their offsets to ``table``. Returns the offset after the last
    element that was written.

    A contains the rows of all projections, one projection after the other. B contains one row for each feature. The
    length of a row is the projection's rank, padded with zeros.

    Args:
        shape: Shape of the product.
        updates: One update for each projection, or None.
        memory: ``[elements]``.
        start: Offset of the first element to write.
        table: ``[columns]``, see ``ProductShape.columns``.
    """
    parts = len(shape.features)
    ranks = [0 if update is None else update.rank for update in updates]
    table[0] = start
    table[parts + 1 :] = [0, *accumulate(ranks)]
    own = [update.a for update in updates if update is not None]
    if own:
        a = memory[start : start + sum(ranks) * shape.in_features]
        a.copy_(torch.cat(own).reshape(-1))
    end = start + _whole(sum(ranks) * shape.in_features)
    for part, (update, features) in enumerate(zip(updates, shape.features, strict=True)):
        table[1 + part] = end
        if update is None:
            continue
        stride = row_stride(update.rank)
        b = memory[end : end + features * stride].view(features, stride)
        b[:, : update.rank].copy_(update.b)
        b[:, update.rank :].zero_()
        end += _whole(features * stride)
    return end


def _whole(numbers: int) -> int:
    return -(-numbers // ALIGNED) * ALIGNED


# Tiles for the kernels: each tile has rows of a step that use the same adapter, and the slot of that adapter.

TILE_ROWS = 16
"""Number of rows per tile, for steps of any size. This number is the smallest that tensor cores support. The sums of a
row therefore always use the same instruction, whatever other rows are in the batch.
"""


@dataclass(frozen=True, slots=True)
class RowTiles:
    """Tiles of a step, on the device. No row is in two tiles.

    Attributes:
        slots: int32 ``[tiles]``: slot of the adapter of the tile's rows, or -1 for an unused tile.
        rows: int32 ``[tiles, TILE_ROWS]``: row indices, or -1 for padding.
    """

    slots: torch.Tensor
    rows: torch.Tensor

    def __len__(self) -> int:
        return len(self.slots)


def most_tiles(rows: int, max_loras: int) -> int:
    """Return the maximum number of tiles for ``rows`` rows with up to ``max_loras`` adapters. Each adapter has at most
    one partly filled tile.
    """
    return min(rows, rows // TILE_ROWS + max_loras)


def lay_out(
    segments: Sequence[LoraSegment],
    slots: Mapping[bytes, int],
    of_tiles: npt.NDArray[np.int32],
    of_rows: npt.NDArray[np.int32],
) -> None:
    """Write the tiles of ``segments`` to ``of_tiles`` and ``of_rows``. Rows of the same adapter may share a tile, even
    if they are not adjacent in the batch.

    Args:
        segments: Segments of the step.
        slots: Slots by digest.
        of_tiles: ``[tiles]``, see ``RowTiles.slots``.
        of_rows: ``[tiles, TILE_ROWS]``, see ``RowTiles.rows``.

    Raises:
        ValueError: The segments need more tiles than ``of_tiles`` has.
    """
    of_tiles[:], of_rows[:] = -1, -1
    rows: dict[int, list[IntArray]] = {}
    for segment in segments:
        rows.setdefault(slots[segment.digest], []).append(np.arange(segment.first, segment.end))
    first = 0
    for slot, parts in rows.items():
        own = np.concatenate(parts)
        end = first + -(-len(own) // TILE_ROWS)
        if end > len(of_tiles):
            raise ValueError(
                f"the rows that use adapters need more than {len(of_tiles)} tiles, which is the number of allocated tiles"
            )
        of_tiles[first:end] = slot
        of_rows[first:end].reshape(-1)[: len(own)] = own
        first = end


# Assignment of slots to adapters, as a state machine. Its inputs are steps and adapters. Its outputs are the slots to
# write.


@dataclass(frozen=True, slots=True)
class SlotLimits:
    """Size of the slot memory: ``max_loras`` slots, each large enough for an update of rank ``max_rank`` of every
    layer.
    """

    max_loras: int
    max_rank: int


class DeviceSlots:
    """Assigns ``count`` slots to adapters. If no slot is free, a new adapter replaces the least recently used adapter."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._free = list(range(count))
        self._slots: dict[bytes, int] = {}  # the least recently used adapter is first
        self._last: frozenset[bytes] = frozenset()

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._slots

    def __getitem__(self, digest: bytes) -> int:
        return self._slots[digest]

    def offer(self, digest: bytes) -> int | None:
        """Assign a slot to an adapter before its first step. Returns the slot to write.

        Returns None if the adapter already has a slot, or if adapters of the last step occupy all slots. Adapters of
        the last step keep their slots, because the next step probably uses them as well.
        """
        return None if digest in self._slots else self._take(digest, self._last)

    def begin_step(self, digests: Collection[bytes]) -> dict[bytes, int]:
        """Assign slots to the adapters of a step. Returns the slots to write before the step, by digest.

        Raises ValueError if the step has more adapters than there are slots. In that case, nothing changes.
        """
        wanted = frozenset(digests)
        if len(wanted) > self._count:
            raise ValueError(f"a step has {len(wanted)} adapters, but there are only {self._count} slots")
        fresh = {}
        for digest in dict.fromkeys(digests):
            if digest in self._slots:
                self._slots[digest] = self._slots.pop(digest)
                continue
            # A slot is always available, because the step has at most as many adapters as there are slots.
            if (slot := self._take(digest, wanted)) is not None:
                fresh[digest] = slot
        self._last = wanted
        return fresh

    def remove(self, digest: bytes) -> None:
        """Free the slot of an adapter. Does nothing if the adapter has no slot."""
        if (slot := self._slots.pop(digest, None)) is not None:
            self._free.append(slot)

    def clear(self) -> None:
        """Free all slots."""
        for digest in list(self._slots):
            self.remove(digest)
        self._last = frozenset()

    def _take(self, digest: bytes, stay: Collection[bytes]) -> int | None:
        if not self._free:
            oldest = next((other for other in self._slots if other not in stay), None)
            if oldest is None:
                return None
            self.remove(oldest)
        slot = self._free.pop(0)
        self._slots[digest] = slot
        return slot


# The memory of the slots, and adapters in the layout of that memory.

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Place:
    """Linear layers that one matrix product computes: they have the same input, and their outputs are concatenated.

    Attributes:
        layers: ``(out, in)`` features of each layer, by name.
        of_rows: Whether the layers' input contains only the rows whose logits are needed. Otherwise it contains all
            tokens.
    """

    layers: Mapping[str, tuple[int, int]]
    of_rows: bool = False

    @property
    def shape(self) -> ProductShape:
        """Shape of the matrix product of these layers."""
        [in_features] = {in_features for _, in_features in self.layers.values()}
        return ProductShape(in_features, tuple(out for out, _ in self.layers.values()))


@dataclass(frozen=True, slots=True)
class Image:
    """An adapter in host memory, in the layout of a slot. The memory is not page-locked.

    Attributes:
        numbers: Matrices of all places.
        table: int64 offsets of all places.
        updates: Whether the adapter has an update in each place.
    """

    numbers: torch.Tensor
    table: torch.Tensor
    updates: tuple[bool, ...]


class SlotMemory:
    """Device memory for ``limits.max_loras`` adapters.

    Attributes:
        places: The layers that adapters may update.
        matrices: Views of the memory, by place. Empty while no memory is allocated.
    """

    def __init__(self, places: Sequence[Place], limits: SlotLimits, dtype: torch.dtype, device: torch.device) -> None:
        self.places = list(places)
        self.matrices: list[SlotMatrices] = []
        self._limits = limits
        self._dtype = dtype
        self._device = device
        self._shapes = [place.shape for place in self.places]
        self._numbers = torch.empty(0)
        self._table = torch.empty(0)

    @property
    def num_bytes(self) -> int:
        """Size of all slots in bytes, even if they are not allocated."""
        of_slot = sum(shape.numbers([self._limits.max_rank] * len(shape.features)) for shape in self._shapes)
        return self._limits.max_loras * of_slot * self._dtype.itemsize

    def scratch_numbers(self, tiles: int, tile_rows: int) -> int:
        """Return the number of float32 values that the first kernel of any place passes to the second kernel, for
        ``tiles`` tiles.
        """
        return max(matrices.scratch_numbers(tiles, tile_rows) for matrices in self.matrices)

    @torch.inference_mode(False)
    def allocate(self) -> None:
        """Allocate the memory of the slots, unless it is already allocated. Raises ModelLoadError if the device has too
        little memory.
        """
        if self.matrices:
            return
        count, device, columns = self._limits.max_loras, self._device, [shape.columns for shape in self._shapes]
        try:
            self._numbers = torch.zeros(
                count, self.num_bytes // self._dtype.itemsize // count, dtype=self._dtype, device=device
            )
        except torch.OutOfMemoryError as e:
            raise ModelLoadError(
                f"lora.max_loras is {count} and lora.max_lora_rank is {self._limits.max_rank}, so adapter slots need "
                f"{in_units(self.num_bytes)} on {device}, which has less free memory; use smaller values"
            ) from e
        logger.info("allocated device memory for %d LoRA adapters, %s in total", count, in_units(self.num_bytes))
        self._table = torch.zeros(count, sum(columns), dtype=torch.int64, device=device)
        tables = torch.split(self._table, columns, dim=1)
        self.matrices = [
            SlotMatrices(
                shape, self._numbers, table, torch.from_numpy(shape.pieces()).to(device), self._limits.max_rank
            )
            for shape, table in zip(self._shapes, tables, strict=True)
        ]

    def release(self) -> None:
        """Free the memory of the slots. The adapters in the slots are lost."""
        self.matrices = []
        self._numbers = self._table = torch.empty(0)

    def image(self, adapter: LoraAdapter) -> Image:
        """Return ``adapter`` in the layout of a slot. Thread-safe.

        Raises ValueError if an update is for an unknown layer, or if the features or the rank of an update do not fit.
        """
        left = dict(adapter.updates)
        taken = [self._take(place, left) for place in self.places]
        if left:
            raise ValueError(f"layer {min(left)} does not support LoRA adapters on this device")
        ranks = [[0 if update is None else update.rank for update in updates] for updates in taken]
        sizes = [shape.numbers(own) for shape, own in zip(self._shapes, ranks, strict=True)]
        numbers = torch.zeros(sum(sizes), dtype=self._dtype)
        table = torch.zeros(sum(shape.columns for shape in self._shapes), dtype=torch.int64)
        starts = np.cumsum([0, *sizes[:-1]])
        views = np.split(table.numpy(), np.cumsum([shape.columns for shape in self._shapes])[:-1])
        for shape, updates, start, view in zip(self._shapes, taken, starts.tolist(), views, strict=True):
            pack(shape, updates, numbers, start, view)
        if self._dtype == torch.float16 and not bool(numbers.isfinite().all()):
            raise ValueError("the adapter's weights, multiplied by the adapter's scale, exceed the range of float16")
        return Image(numbers, table, tuple(map(any, ranks)))

    def pairs(self, image: Image, slot: int) -> Pairs:
        """Return the tensors of ``slot``, each with the tensor of ``image`` to copy there."""
        return [(self._numbers[slot, : len(image.numbers)], image.numbers), (self._table[slot], image.table)]

    def _take(self, place: Place, left: dict[str, LowRankUpdate]) -> list[LowRankUpdate | None]:
        """Remove the updates of a place's layers from ``left`` and return them."""
        own = [left.pop(name, None) for name in place.layers]
        for (name, features), update in zip(place.layers.items(), own, strict=True):
            if update is None:
                continue
            expect_features(name, update, *features)
            if update.rank > self._limits.max_rank:
                raise ValueError(
                    f"the update of {name} has rank {update.rank}; the limit is lora.max_lora_rank, {self._limits.max_rank}"
                )
        return own
