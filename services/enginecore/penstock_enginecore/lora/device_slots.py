"""Slots of device memory for adapters: which adapters are in them, and how adapters get into them."""

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from penstock_common.memory import in_units
from penstock_enginecore.attention.base import IntArray
from penstock_enginecore.lora.adapter import LoraAdapter, LoraSegment, LowRankUpdate, expect_features
from penstock_enginecore.models.errors import ModelLoadError

# What kernels read to add adapters to a product: where matrices are in their slots, and tiles of the rows that have them.

# A slot is one piece of memory for all of an adapter's matrices, as large as ``max_lora_rank`` asks for, of which an adapter
# fills what its ranks take. So an adapter comes to the device in one copy, and a second one for the table that says where its
# matrices begin.

ALIGNED = 16
"""Numbers at a multiple of which a matrix begins, and of half of which a row of B does: vectors are loaded."""
ROW_ALIGNED = 8
PIECE = 128
"""Output features of a program. A piece has features of one projection."""
_CHUNK = 1024
_MOST_CHUNKS = 8
_STEP = 128


@dataclass(frozen=True, slots=True)
class ProductShape:
    """Projections of one input ``[rows, in_features]``, whose outputs, of ``features``, are side by side. Each has an A and a B
    in an adapter, or none.
    """

    in_features: int
    features: tuple[int, ...]

    @property
    def columns(self) -> int:
        """Of its table: where A begins, where each projection's B does, and where its rows in A begin and those of the last
        end.
        """
        return 2 * len(self.features) + 2

    @property
    def chunk(self) -> int:
        """Columns of A that a program takes, of any step: a long sum is the sum of sums of chunks, in their order."""
        whole = -(-self.in_features // (_MOST_CHUNKS * _STEP)) * _STEP
        return max(_CHUNK, whole)

    @property
    def chunks(self) -> int:
        """How many there are."""
        return -(-self.in_features // self.chunk)

    def numbers(self, ranks: Sequence[int]) -> int:
        """That matrices of ``ranks`` take, one for each projection, 0 where it has none."""
        of_b = [_whole(features * row_stride(rank)) for features, rank in zip(self.features, ranks, strict=True)]
        return _whole(sum(ranks) * self.in_features) + sum(of_b)

    def pieces(self) -> npt.NDArray[np.int32]:
        """int32 ``[pieces, 4]``: the projection of each, its first feature, and where the projection's begin and end."""
        starts = [0, *accumulate(self.features)]
        found = [
            (part, first, starts[part], starts[part + 1])
            for part in range(len(self.features))
            for first in range(starts[part], starts[part + 1], PIECE)
        ]
        return np.array(found, dtype=np.int32)


@dataclass(frozen=True, slots=True)
class SlotMatrices:
    """Those of one product in all slots, on the device. ``numbers`` ``[slots, numbers of a slot]``, of all products; ``table``
    int64 ``[slots, columns]``, see ``ProductShape``; ``pieces`` int32 ``[pieces, 4]``. ``max_rank``: of a projection.
    """

    shape: ProductShape
    numbers: torch.Tensor
    table: torch.Tensor
    pieces: torch.Tensor
    max_rank: int

    @property
    def most_ranks(self) -> int:
        """Rows of A at most."""
        return len(self.shape.features) * self.max_rank

    def scratch_numbers(self, tiles: int, tile_rows: int) -> int:
        """Float32 numbers that stand between the two kernels, for so many tiles."""
        return self.shape.chunks * tiles * tile_rows * self.most_ranks


def row_stride(rank: int) -> int:
    """Numbers from one row of a B of ``rank`` to the next."""
    return -(-rank // ROW_ALIGNED) * ROW_ALIGNED


def pack(
    shape: ProductShape, updates: Sequence[LowRankUpdate | None], memory: torch.Tensor, start: int, table: IntArray
) -> int:
    """Write the matrices of ``updates``, one for each projection, to ``memory`` ``[numbers]`` from number ``start`` on, and where
    they are to ``table`` ``[columns]``. Returns where they end. A: rows of the projections one behind the other, those of each
    from its start on. B: a row for each feature, with the projection's rank, zeros behind.
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


# Rows of a step that have adapters, in the tiles that kernels multiply: which rows, and whose matrices.

TILE_ROWS = 16
"""Rows of a tile: the fewest that tensor cores multiply, in steps of any size. So a row's sums are those of one instruction,
whatever is computed beside it.
"""


@dataclass(frozen=True, slots=True)
class RowTiles:
    """On the device. ``slots`` int32 ``[tiles]``: where the adapter of a tile's rows is, -1 for a tile of none; ``rows`` int32
    ``[tiles, TILE_ROWS]``: which rows, -1 for none. No row is in two tiles.
    """

    slots: torch.Tensor
    rows: torch.Tensor

    def __len__(self) -> int:
        return len(self.slots)


def most_tiles(rows: int, max_loras: int) -> int:
    """The most tiles that ``rows`` rows with up to ``max_loras`` adapters fill: of each adapter one at most is not full."""
    return min(rows, rows // TILE_ROWS + max_loras)


def lay_out(
    segments: Sequence[LoraSegment],
    slots: Mapping[bytes, int],
    of_tiles: npt.NDArray[np.int32],
    of_rows: npt.NDArray[np.int32],
) -> None:
    """Write the tiles of ``segments`` to ``of_tiles`` ``[tiles]`` and ``of_rows`` ``[tiles, TILE_ROWS]``, see ``RowTiles``. An
    adapter's rows share tiles, wherever they are. ``slots``: by digest. ValueError for more than there are tiles.
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
            raise ValueError(f"rows with adapters fill more than {len(of_tiles)} tiles")
        of_tiles[first:end] = slot
        of_rows[first:end].reshape(-1)[: len(own)] = own
        first = end


# A state machine: steps and adapters in, which slot is to be written out.


@dataclass(frozen=True, slots=True)
class SlotLimits:
    """``max_loras`` slots, each with room for an update of ``max_rank`` of every layer."""

    max_loras: int
    max_rank: int


class DeviceSlots:
    """``count`` slots. An adapter that needs one takes a free slot, or that of the adapter whose steps are the longest ago."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._free = list(range(count))
        self._slots: dict[bytes, int] = {}  # of the adapters in them, those first whose steps are the longest ago
        self._last: frozenset[bytes] = frozenset()

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._slots

    def __getitem__(self, digest: bytes) -> int:
        return self._slots[digest]

    def offer(self, digest: bytes) -> int | None:
        """A slot for an adapter ahead of its first step: to be written. None where it has one already, and where all are those of
        the last step's adapters, whose next step is likely to come.
        """
        return None if digest in self._slots else self._take(digest, self._last)

    def begin_step(self, digests: Collection[bytes]) -> dict[bytes, int]:
        """A step has these adapters. Returns those whose slots are to be written before it, with their slots. ValueError for more
        adapters than there are slots; nothing has changed then.
        """
        wanted = frozenset(digests)
        if len(wanted) > self._count:
            raise ValueError(f"a step has {len(wanted)} adapters, and there are slots for {self._count}")
        fresh = {}
        for digest in dict.fromkeys(digests):
            if digest in self._slots:
                self._slots[digest] = self._slots.pop(digest)
                continue
            if (slot := self._take(digest, wanted)) is not None:  # there is one: others do not need all of them
                fresh[digest] = slot
        self._last = wanted
        return fresh

    def remove(self, digest: bytes) -> None:
        """An adapter is gone; one that has no slot is passed over."""
        if (slot := self._slots.pop(digest, None)) is not None:
            self._free.append(slot)

    def clear(self) -> None:
        """Nothing is in any slot."""
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


# The memory of slots, and copies into it.

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Place:
    """Linear layers of one input by name, whose outputs are side by side, with their ``(out, in)`` features. ``of_rows``: they
    get the rows whose logits are wanted, in place of tokens.
    """

    layers: Mapping[str, tuple[int, int]]
    of_rows: bool = False

    @property
    def shape(self) -> ProductShape:
        """Of their product."""
        [in_features] = {in_features for _, in_features in self.layers.values()}
        return ProductShape(in_features, tuple(out for out, _ in self.layers.values()))


@dataclass(frozen=True, slots=True)
class Image:
    """An adapter as a slot holds it, in host memory: ``numbers``, and ``table`` int64, of all places. ``updates``: whether it has
    any in each place.
    """

    numbers: torch.Tensor
    table: torch.Tensor
    updates: tuple[bool, ...]


class Copies(Protocol):
    """Copies to a device beside what it computes."""

    def begin(self, copy: Callable[[], None]) -> Any:
        """Begin what ``copy`` copies once all that was launched is over, for steps may read what it overwrites. Nobody waits.
        Returns what tells its end.
        """

    def await_end(self, end: Any) -> None:
        """What is launched from now on comes after it; the host does not wait."""


class SideStream:
    """Copies to a GPU, on a stream of their own."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def begin(self, copy: Callable[[], None]) -> torch.cuda.Event:
        """Returns an event."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            copy()
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return event

    def await_end(self, end: torch.cuda.Event) -> None:
        """By the current stream."""
        torch.cuda.current_stream().wait_event(end)


class AtOnce:
    """Copies on a CPU."""

    def begin(self, copy: Callable[[], None]) -> None:
        """They are over when this returns."""
        copy()

    def await_end(self, end: None) -> None:
        """There is nothing to wait for."""


class SlotMemory:
    """Room for ``limits.max_loras`` adapters of ``places``, numbers of ``dtype``. ``matrices``: by place, if there is memory."""

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
        """Of all slots, allocated or not."""
        of_slot = sum(shape.numbers([self._limits.max_rank] * len(shape.features)) for shape in self._shapes)
        return self._limits.max_loras * of_slot * self._dtype.itemsize

    def scratch_numbers(self, tiles: int, tile_rows: int) -> int:
        """Float32 numbers that the kernels of one place need between them, for so many tiles."""
        return max(matrices.scratch_numbers(tiles, tile_rows) for matrices in self.matrices)

    @torch.inference_mode(False)
    def allocate(self) -> None:
        """Take the memory, if it is not there. Raises ModelLoadError where the device has too little."""
        if self.matrices:
            return
        count, device, columns = self._limits.max_loras, self._device, [shape.columns for shape in self._shapes]
        try:
            self._numbers = torch.zeros(
                count, self.num_bytes // self._dtype.itemsize // count, dtype=self._dtype, device=device
            )
        except torch.OutOfMemoryError as e:
            raise ModelLoadError(
                f"lora.max_loras is {count} and lora.max_lora_rank {self._limits.max_rank}: adapters take "
                f"{in_units(self.num_bytes)} of {device}, which has less left; use smaller ones"
            ) from e
        logger.info("slots for %d adapters take %s", count, in_units(self.num_bytes))
        self._table = torch.zeros(count, sum(columns), dtype=torch.int64, device=device)
        tables = torch.split(self._table, columns, dim=1)
        self.matrices = [
            SlotMatrices(
                shape, self._numbers, table, torch.from_numpy(shape.pieces()).to(device), self._limits.max_rank
            )
            for shape, table in zip(self._shapes, tables, strict=True)
        ]

    def release(self) -> None:
        """Let go of it, and of what is in it."""
        self.matrices = []
        self._numbers = self._table = torch.empty(0)

    def image(self, adapter: LoraAdapter) -> Image:
        """``adapter`` as a slot holds it. Raises ValueError for an update of a layer that is in no place, or has other features
        or a larger rank. Any thread may call.
        """
        left = dict(adapter.updates)
        taken = [self._take(place, left) for place in self.places]
        if left:
            raise ValueError(f"{min(left)} takes no update on this device")
        ranks = [[0 if update is None else update.rank for update in updates] for updates in taken]
        sizes = [shape.numbers(own) for shape, own in zip(self._shapes, ranks, strict=True)]
        on_gpu = self._device.type == "cuda"
        numbers = torch.zeros(sum(sizes), dtype=self._dtype, pin_memory=on_gpu)
        table = torch.zeros(sum(shape.columns for shape in self._shapes), dtype=torch.int64, pin_memory=on_gpu)
        starts = np.cumsum([0, *sizes[:-1]])
        views = np.split(table.numpy(), np.cumsum([shape.columns for shape in self._shapes])[:-1])
        for shape, updates, start, view in zip(self._shapes, taken, starts.tolist(), views, strict=True):
            pack(shape, updates, numbers, start, view)
        if self._dtype == torch.float16 and not bool(numbers.isfinite().all()):
            raise ValueError("its numbers, times its scale, are larger than float16 holds")
        return Image(numbers, table, tuple(map(any, ranks)))

    def copy(self, image: Image, slot: int) -> None:
        """Begin the copies of ``image`` to ``slot``, on the current stream."""
        self._numbers[slot, : len(image.numbers)].copy_(image.numbers, non_blocking=True)
        self._table[slot].copy_(image.table, non_blocking=True)

    def _take(self, place: Place, left: dict[str, LowRankUpdate]) -> list[LowRankUpdate | None]:
        """Those of its layers, out of ``left``."""
        own = [left.pop(name, None) for name in place.layers]
        for (name, features), update in zip(place.layers.items(), own, strict=True):
            if update is None:
                continue
            expect_features(name, update, *features)
            if update.rank > self._limits.max_rank:
                raise ValueError(
                    f"the update of {name} has rank {update.rank}, lora.max_lora_rank is {self._limits.max_rank}"
                )
        return own
