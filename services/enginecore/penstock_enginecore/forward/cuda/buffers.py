"""Device tensors of the fused decoder that keep their addresses, and how a step's inputs get into them.

A step's inputs are laid out in page-locked host memory and cross to the device in one copy; there they are spread to the tensors
that kernels read. There are two host slots: one is written while the copy out of the other may still be under way.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from penstock_enginecore.attention.base import IntArray
from penstock_enginecore.forward.base import FedTokens, ForwardBatch
from penstock_enginecore.forward.cuda.kernel_api import Draws, GroupInputs
from penstock_enginecore.sample.base import PlainDraws

MAX_CAPTURED_TOKENS = 512
"""Steps of up to so many tokens, padding included, run on tensors that never move."""
_MIXED_REQUESTS = (16, 64, 256, MAX_CAPTURED_TOKENS)
"""Requests that a step with more tokens than requests is padded to."""
DRAW_DTYPES = (torch.float32, torch.int64, torch.int64, torch.float32, torch.int32, torch.float64)
"""Those of the fields of ``Draws``, in their order."""
_GREEDY = (0.0, 0, 0, math.inf, 0, 1.0)
"""By field of ``Draws``, what rows have that are not drawn."""
_NUM_DRAWS = len(DRAW_DTYPES)
_NONE: IntArray = np.zeros(0, dtype=np.int64)
_UNDRAWN = (_NONE,) * _NUM_DRAWS
ALIGNMENT = 256
"""Bytes at a multiple of which each tensor begins: what CUDA's own allocations do, and vector loads rely on."""


@dataclass(frozen=True, slots=True)
class StepShape:
    """Sizes of a step's tensors: ``tokens``, and ``requests``, which is also how many rows get logits."""

    tokens: int
    requests: int

    @property
    def is_large(self) -> bool:
        """Whether it is beyond those that are padded and captured."""
        return max(self.tokens, self.requests) > MAX_CAPTURED_TOKENS


CAPTURED = StepShape(MAX_CAPTURED_TOKENS, MAX_CAPTURED_TOKENS)
"""The largest padded shape."""


def padded_shape(tokens: int, requests: int) -> StepShape:
    """The shape that a step runs in. Tokens are padded to the next power of two up to 16, then to the next multiple of 16, beyond
    256 of 32; requests to as many where each has one token, else to one of a few numbers, so that steps which mix prompts and
    decodes have few shapes as well. Steps larger than ``MAX_CAPTURED_TOKENS`` are not padded.
    """
    if (exact := StepShape(tokens, requests)).is_large:
        return exact
    padded = _padded(tokens)
    if requests >= tokens:
        return StepShape(padded, _padded(requests))
    return StepShape(padded, min(padded, next(count for count in _MIXED_REQUESTS if count >= requests)))


def decode_sizes(most: int) -> list[int]:
    """Tokens of the padded shapes of steps that have up to ``most`` requests of one token each, in ascending order."""
    return sorted({_padded(count) for count in range(1, min(most, MAX_CAPTURED_TOKENS) + 1)})


def _padded(count: int) -> int:
    if count <= 16:
        return 1 << (count - 1).bit_length()
    step = 16 if count <= 256 else 32
    return -(-count // step) * step


@dataclass(frozen=True, slots=True)
class FedInputs:
    """Tokens that the device knows, ``[tokens]`` each: ``known`` bool, the ``rows`` int64 whose newest they are; ``ids`` int32 is
    room for them.
    """

    known: torch.Tensor
    rows: torch.Tensor
    ids: torch.Tensor


@dataclass(frozen=True, slots=True)
class StepInputs:
    """What kernels read of a step, on the device: ``token_ids`` and ``positions`` int32 ``[tokens]``, ``rows`` int32
    ``[requests]``, which tokens get logits; ``groups``: one per KV cache group. ``draws``: how the rows' tokens are chosen, and
    ``kept_rows`` int64 ``[requests]`` whose newest these become.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    rows: torch.Tensor
    groups: tuple[GroupInputs, ...]
    fed: FedInputs
    draws: Draws
    kept_rows: torch.Tensor


class InputBuffers:
    """Inputs of steps of up to ``max_shape``, whose sequences fill ``max_blocks`` blocks at most in each of ``num_groups`` KV
    cache groups. ``slots``: what they are laid out in on their way.
    """

    def __init__(
        self, max_shape: StepShape, num_groups: int, max_blocks: int, slots: "HostSlots", device: torch.device
    ) -> None:
        self.max_shape = max_shape
        self._slots = slots
        tokens, requests = max_shape.tokens, max_shape.requests
        of_all = [(length, torch.int32) for length in (tokens, tokens, requests, requests + 1, requests)]
        of_fed = [(tokens, torch.bool), (tokens, torch.int64)]
        of_choice = [(requests, dtype) for dtype in (*DRAW_DTYPES, torch.int64)]
        self._layout = VectorLayout([*of_all, *of_fed, *of_choice, *[(tokens, torch.int64)] * num_groups])
        self._flat = torch.zeros(self._layout.num_bytes, dtype=torch.uint8, device=device)
        self._views = self._layout.views(self._flat)
        self._fed_ids = torch.zeros(tokens, dtype=torch.int32, device=device)
        self._tables = [torch.zeros(requests, max_blocks, dtype=torch.int32, device=device) for _ in range(num_groups)]

    def of(self, shape: StepShape) -> StepInputs:
        """The tensors of a step of ``shape``: the same memory each time."""
        tokens, requests = shape.tokens, shape.requests
        token_ids, positions, rows, starts, seq_lens, known, fed_rows, *others = self._views
        draws, kept_rows, slots = others[:_NUM_DRAWS], others[_NUM_DRAWS], others[_NUM_DRAWS + 1 :]
        return StepInputs(
            token_ids[:tokens],
            positions[:tokens],
            rows[:requests],
            tuple(
                GroupInputs(table[:requests], starts[: requests + 1], seq_lens[:requests], slot[:tokens])
                for table, slot in zip(self._tables, slots, strict=True)
            ),
            FedInputs(known[:tokens], fed_rows[:tokens], self._fed_ids[:tokens]),
            Draws(*(vector[:requests] for vector in draws)),
            kept_rows[:requests],
        )

    def load(self, batch: ForwardBatch, rows: IntArray, shape: StepShape, nobody: int = 0) -> None:
        """Bring a step to the device, padded to ``shape``. Begins the copies, and does not wait for them. ``nobody``: the row
        whose newest token nobody reads.
        """
        attention, first = batch.attention, batch.attention[0]
        tables = [np.ascontiguousarray(metadata.block_table, dtype=np.int32) for metadata in attention]
        fixed = self._layout.num_bytes
        host = self._slots.take(fixed + sum(table.nbytes for table in tables))
        views = [view.numpy() for view in self._layout.views(host.memory)]
        _fill(views[0], batch.token_ids, shape.tokens, 0)
        _fill(views[1], batch.positions, shape.tokens, 0)
        _fill(views[2], rows, shape.requests, 0)
        _fill(views[3], first.query_start_loc, shape.requests + 1, len(batch.token_ids))
        _fill(views[4], first.seq_lens, shape.requests, 0)
        _lay_out_fed(views[5:7], batch.fed, shape)
        *draws, kept_rows = views[7 : 8 + _NUM_DRAWS]
        chosen = _UNDRAWN if batch.choice is None else draw_values(batch.choice.draws)
        for view, values, neutral in zip(draws, chosen, _GREEDY, strict=True):
            _fill(view, values, shape.requests, neutral)
        _fill(kept_rows, _NONE if batch.choice is None else batch.choice.kept_rows, shape.requests, nobody)
        for view, metadata in zip(views[8 + _NUM_DRAWS :], attention, strict=True):
            _fill(view, metadata.slot_mapping, shape.tokens, -1)
        end = fixed
        for table in tables:
            host.memory[end : end + table.nbytes].numpy()[:] = table.reshape(-1).view(np.uint8)
            end += table.nbytes
        arrived = host.send(end)
        self._flat.copy_(arrived[:fixed])
        start = fixed
        for held, table in zip(self._tables, tables, strict=True):
            part = arrived[start : start + table.nbytes].view(torch.int32)
            held[: table.shape[0], : table.shape[1]].copy_(part.view(table.shape))
            start += table.nbytes


class HostSlots:
    """Two slots in turn, and the device memory that they are copied to."""

    def __init__(self, slots: tuple["HostSlot", "HostSlot"]) -> None:
        self._next, self._last = slots

    @classmethod
    def on(cls, device: torch.device) -> "HostSlots":
        """For copies to ``device``."""
        make_event = torch.cuda.Event if device.type == "cuda" else None
        return cls((HostSlot(device, make_event), HostSlot(device, make_event)))

    def take(self, num_bytes: int) -> "HostSlot":
        """The slot whose turn it is, with room for ``num_bytes``. Waits until what it held before has left it."""
        self._next, self._last = self._last, self._next
        self._last.reserve(num_bytes)
        return self._last


class HostSlot:
    """``memory``: uint8 on the host. ``make_event``: makes what tells the end of a copy, where copies go on after the call that
    begins them; the memory is page-locked there, or they would not.
    """

    def __init__(self, device: torch.device, make_event: Callable[[], Any] | None) -> None:
        self.memory = torch.empty(0, dtype=torch.uint8)
        self._device = device
        self._event = None if make_event is None else make_event()
        self._arrived = torch.empty(0, dtype=torch.uint8, device=device)

    def reserve(self, num_bytes: int) -> None:
        """Wait for the copy that was begun last, and have room."""
        if self._event is not None:
            self._event.synchronize()
        if len(self.memory) < num_bytes:
            size = 1 << (num_bytes - 1).bit_length()
            self.memory = torch.empty(size, dtype=torch.uint8, pin_memory=self._device.type == "cuda")
            self._arrived = torch.empty(size, dtype=torch.uint8, device=self._device)

    def send(self, num_bytes: int) -> torch.Tensor:
        """Begin the copy of the first ``num_bytes``: uint8 on the device, valid for what follows on the stream."""
        self._arrived[:num_bytes].copy_(self.memory[:num_bytes], non_blocking=True)
        if self._event is not None:
            self._event.record()
        return self._arrived[:num_bytes]


class VectorLayout:
    """Vectors in one piece of memory, given by their lengths and dtypes."""

    def __init__(self, vectors: Sequence[tuple[int, torch.dtype]]) -> None:
        self._parts: list[tuple[int, int, torch.dtype]] = []
        start = 0
        for length, dtype in vectors:
            num_bytes = length * dtype.itemsize
            self._parts.append((start, start + num_bytes, dtype))
            start += -(-num_bytes // ALIGNMENT) * ALIGNMENT
        self.num_bytes = start

    def views(self, memory: torch.Tensor) -> list[torch.Tensor]:
        """The vectors in ``memory``, uint8 of at least ``num_bytes``."""
        return [memory[start:end].view(dtype) for start, end, dtype in self._parts]


def draw_values(draws: PlainDraws) -> tuple[npt.NDArray[Any], ...]:
    """What ``Draws`` are on the device, in its order, and in ``DRAW_DTYPES``."""
    return (
        draws.temperature,
        draws.seeds.view(np.int64),
        draws.output_indices,
        draws.max_distance,
        draws.top_k,
        draws.top_p,
    )


def _lay_out_fed(views: Sequence[Any], fed: FedTokens | None, shape: StepShape) -> None:
    known, rows = (view[: shape.tokens] for view in views)
    known[:] = False
    rows[:] = 0
    if fed is not None:
        known[fed.places] = True
        rows[fed.places] = fed.rows


def _fill(view: Any, values: npt.NDArray[Any], length: int, padding: float) -> None:
    """``values`` and then ``padding`` in the first ``length`` numbers of ``view``."""
    view[: len(values)] = values
    view[len(values) : length] = padding
