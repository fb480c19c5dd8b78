"""Slots of device memory for adapters: which adapters are in them, and how adapters get into them."""

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from penstock_common.memory import in_units
from penstock_enginecore.lora.adapter import LoraAdapter, LowRankUpdate
from penstock_enginecore.lora.kernel_operands import ProductShape, SlotMatrices, pack
from penstock_enginecore.lora.reference import expect_features
from penstock_enginecore.models.errors import ModelLoadError

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
