"""Adapters of a model on a GPU: in host memory as many as there are, in slots of device memory those of the steps.

A step's rows are laid out in tiles of one adapter, in tensors that never move where the step is of a padded shape. An adapter
that is in no slot when its step comes is copied on a stream of its own; that step waits for it on the device, others do not.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from penstock_enginecore.forward.cuda.buffers import CAPTURED, HostSlots, StepShape, VectorLayout
from penstock_enginecore.forward.cuda.kernel_api import LowRankKernels
from penstock_enginecore.lora.adapter import BLANK, LoraAdapter, LoraSegment
from penstock_enginecore.lora.device_slots import DeviceSlots, SlotLimits
from penstock_enginecore.lora.reference import expect_known
from penstock_enginecore.lora.row_tiles import TILE_ROWS, RowTiles, lay_out, most_tiles
from penstock_enginecore.lora.slot_memory import AtOnce, Copies, Image, Place, SideStream, SlotMemory


class StepTiles:
    """Tiles of a step's tokens, and of its rows that get logits, up to ``max_shape``, and what kernels need between them."""

    def __init__(self, max_shape: StepShape, memory: SlotMemory, max_loras: int, device: torch.device) -> None:
        self.max_shape = max_shape
        self._max_loras = max_loras
        self._host = HostSlots.on(device)
        counts = [most_tiles(rows, max_loras) for rows in (max_shape.tokens, max_shape.requests)]
        self._layout = VectorLayout([(size, torch.int32) for count in counts for size in (count, count * TILE_ROWS)])
        with torch.inference_mode(False):
            self._flat = torch.zeros(self._layout.num_bytes, dtype=torch.uint8, device=device)
            self.scratch = torch.zeros(memory.scratch_numbers(max(counts), TILE_ROWS), device=device)
        self._views = self._layout.views(self._flat)

    def of(self, shape: StepShape) -> tuple[RowTiles, RowTiles]:
        """Those of tokens and of rows in a step of ``shape``: the same memory each time."""
        counts = [most_tiles(rows, self._max_loras) for rows in (shape.tokens, shape.requests)]
        slots, rows = self._views[::2], self._views[1::2]
        of_tokens, of_rows = (
            RowTiles(own[:count], each.view(-1, TILE_ROWS)[:count])
            for own, each, count in zip(slots, rows, counts, strict=True)
        )
        return of_tokens, of_rows

    def load(self, segments: Sequence[LoraSegment], of_rows: Sequence[LoraSegment], slots: DeviceSlots) -> None:
        """Bring those of a step to the device. Begins the copy, and does not wait for it."""
        host = self._host.take(self._layout.num_bytes)
        views = [view.numpy() for view in self._layout.views(host.memory)]
        for own, tile_slots, tile_rows in zip((segments, of_rows), views[::2], views[1::2], strict=True):
            known = {segment.digest: slots[segment.digest] for segment in own}
            lay_out(own, known, tile_slots, tile_rows.reshape(-1, TILE_ROWS))
        self._flat.copy_(host.send(self._layout.num_bytes))


class DeviceAdapters:
    """Those of a model whose products are ``places``. Steps run one at a time; the methods are called between them, but for
    ``prepare``. ``copies``: to the device.
    """

    def __init__(
        self,
        places: Sequence[Place],
        limits: SlotLimits,
        dtype: torch.dtype,
        device: torch.device,
        kernels: LowRankKernels,
        copies: Copies | None = None,
    ) -> None:
        self.memory = SlotMemory(places, limits, dtype, device)
        self._limits = limits
        self._device = device
        self._kernels = kernels
        self._copies: Copies = copies or (SideStream(device) if device.type == "cuda" else AtOnce())
        self._images: dict[bytes, Image] = {}
        self._slots = DeviceSlots(limits.max_loras)
        self._coming: dict[bytes, Any] = {}
        self._captured: StepTiles | None = None
        self._large: StepTiles | None = None
        self._step: tuple[StepTiles, RowTiles, RowTiles] | None = None

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._images

    def allocate(self) -> None:
        """Take the memory of slots, and of steps of padded shapes, if it is not there. Raises ModelLoadError."""
        if self._captured is None:
            self.memory.allocate()
            self._captured = StepTiles(CAPTURED, self.memory, self._limits.max_loras, self._device)

    def release(self) -> None:
        """Let go of the device's memory. Adapters stay in host memory, and get into slots again."""
        self._captured = self._large = None
        self._slots.clear()
        self._coming.clear()
        self.memory.release()

    def reserve(self, shape: StepShape) -> None:
        """Have what a step of ``shape`` would need if it had adapters."""
        self._tiles_for(shape)

    def prepare(self, adapter: LoraAdapter) -> Callable[[], None]:
        """Have its matrices as slots do, on any thread, and return what takes it, between steps. Raises ValueError for what is no
        update of the places' layers.
        """
        return partial(self._add, adapter.digest, self.memory.image(adapter))

    def _add(self, digest: bytes, image: Image) -> None:
        """It is copied ahead of its first step, where a slot is to spare."""
        self._images[digest] = image
        if self._captured is not None and (slot := self._slots.offer(digest)) is not None:
            self._begin_copy(digest, slot)

    def remove(self, digest: bytes) -> None:
        """KeyError where it is not there."""
        del self._images[digest]
        self._slots.remove(digest)
        self._coming.pop(digest, None)

    @contextmanager
    def step(self, segments: Sequence[LoraSegment], of_rows: Sequence[LoraSegment], shape: StepShape) -> Iterator[None]:
        """Within, ``add_to`` adds what the adapters of ``segments``, and of the rows that get logits, add in a step of ``shape``.
        Raises LookupError for an adapter that is not there, ValueError for more than there are slots.
        """
        segments, of_rows = ([each for each in own if each.digest != BLANK] for own in (segments, of_rows))
        expect_known([*segments, *of_rows], self._images)
        tiles = self._tiles_for(shape)
        for digest, slot in self._slots.begin_step([each.digest for each in (*segments, *of_rows)]).items():
            self._begin_copy(digest, slot)
        for digest in {each.digest for each in (*segments, *of_rows)} & self._coming.keys():
            self._copies.await_end(self._coming.pop(digest))
        tiles.load(segments, of_rows, self._slots)
        self._step = tiles, *tiles.of(shape)
        try:
            yield
        finally:
            self._step = None

    def updates(self, place: int) -> bool:
        """Whether an adapter that is here has an update in the place of this number."""
        return any(image.updates[place] for image in self._images.values())

    def add_to(self, place: int, x: torch.Tensor, scale: float, out: torch.Tensor) -> None:
        """Add to what the product of the place of this number has made of ``x``; nothing outside of a step with adapters."""
        if self._step is None:
            return
        tiles, of_tokens, of_rows = self._step
        own = of_rows if self.memory.places[place].of_rows else of_tokens
        self._kernels.add_low_rank(x, self.memory.matrices[place], own, tiles.scratch, scale, out)

    def _begin_copy(self, digest: bytes, slot: int) -> None:
        self._coming[digest] = self._copies.begin(partial(self.memory.copy, self._images[digest], slot))

    def _tiles_for(self, shape: StepShape) -> StepTiles:
        """Those of padded shapes never move; others are allocated when a step first needs so many."""
        if self._captured is None:
            raise RuntimeError("allocate must come before the first step")
        if not shape.is_large:
            return self._captured
        held = StepShape(0, 0) if self._large is None else self._large.max_shape
        if self._large is None or shape.tokens > held.tokens or shape.requests > held.requests:
            self._large = None
            wanted = StepShape(max(shape.tokens, held.tokens), max(shape.requests, held.requests))
            self._large = StepTiles(wanted, self.memory, self._limits.max_loras, self._device)
        return self._large
