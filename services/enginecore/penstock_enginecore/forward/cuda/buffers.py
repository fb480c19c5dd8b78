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


def to_device(vectors: Sequence[tuple[npt.NDArray[Any], torch.dtype]], device: torch.device) -> list[torch.Tensor]:
    """Vectors in these dtypes on ``device``, all in one copy, which is not waited for."""
    layout = VectorLayout([(len(vector), dtype) for vector, dtype in vectors])
    host = torch.empty(layout.num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
    for view, (vector, _) in zip(layout.views(host), vectors, strict=True):
        view.numpy()[:] = vector
    return layout.views(host.to(device, non_blocking=True))


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


# Memory of what flows through the layers of the fused decoder.
#
# What attention needs and what the MLP needs are never there at once, so they share memory.


@dataclass(frozen=True, slots=True)
class Widths:
    """Numbers of a token: ``attended`` are all query heads, ``qkv`` with keys and values, ``intermediate`` the MLP's."""

    hidden: int
    qkv: int
    attended: int
    intermediate: int
    vocab: int


@dataclass(frozen=True, slots=True)
class Activations:
    """Of a step, each ``[tokens, width]``; ``chosen`` and ``logits`` ``[requests, width]``. ``x`` and ``normed`` may change
    their parts. ``query`` and ``attended`` share memory with ``gate_up`` and ``gated``.
    """

    residual: torch.Tensor
    x: torch.Tensor
    normed: torch.Tensor
    qkv: torch.Tensor
    query: torch.Tensor
    attended: torch.Tensor
    gate_up: torch.Tensor
    gated: torch.Tensor
    chosen: torch.Tensor
    logits: torch.Tensor


class ActivationBuffers:
    """For steps of up to ``max_shape``. Zeros at first; later rows of padding hold what was there before, which nobody reads."""

    def __init__(self, max_shape: StepShape, widths: Widths, dtype: torch.dtype, device: torch.device) -> None:
        tokens, requests = max_shape.tokens, max_shape.requests
        self.max_shape = max_shape
        self._widths = widths
        numbers = ALIGNMENT // dtype.itemsize

        def zeros(size: int) -> torch.Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        def aligned(width: int) -> int:
            return -(-tokens * width // numbers) * numbers

        self._hidden = [zeros(tokens * widths.hidden) for _ in range(3)]
        of_attention = [widths.qkv, widths.attended, widths.attended]
        of_mlp = [2 * widths.intermediate, widths.intermediate]
        shared = zeros(max(sum(map(aligned, of_attention)), sum(map(aligned, of_mlp))))
        self._shared = [_parts(shared, [aligned(width) for width in part]) for part in (of_attention, of_mlp)]
        self._chosen = zeros(requests * widths.hidden)
        self._logits = zeros(requests * widths.vocab)

    def of(self, shape: StepShape) -> Activations:
        """The tensors of a step of ``shape``: the same memory each time."""
        tokens, requests, widths = shape.tokens, shape.requests, self._widths

        def rows(flat: torch.Tensor, count: int, width: int) -> torch.Tensor:
            return flat[: count * width].view(count, width)

        residual, x, normed = (rows(flat, tokens, widths.hidden) for flat in self._hidden)
        (qkv, query, attended), (gate_up, gated) = self._shared
        return Activations(
            residual,
            x,
            normed,
            rows(qkv, tokens, widths.qkv),
            rows(query, tokens, widths.attended),
            rows(attended, tokens, widths.attended),
            rows(gate_up, tokens, 2 * widths.intermediate),
            rows(gated, tokens, widths.intermediate),
            rows(self._chosen, requests, widths.hidden),
            rows(self._logits, requests, widths.vocab),
        )


def _parts(memory: torch.Tensor, sizes: list[int]) -> list[torch.Tensor]:
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    return [memory[end - size : end] for size, end in zip(sizes, ends, strict=True)]


# What steps of the fused decoder run on: tensors for their inputs, and for what flows through the layers.


@dataclass(frozen=True, slots=True)
class CacheShape:
    """What of a KV cache the inputs depend on: its groups, and the most blocks that a sequence fills in one of them."""

    num_groups: int
    max_blocks: int


@dataclass(frozen=True, slots=True)
class Step:
    """The tensors of steps of ``shape``: the same memory for each of them, where they are padded. ``buffers`` brings inputs."""

    shape: StepShape
    buffers: InputBuffers
    inputs: StepInputs
    activations: Activations


class StepMemory:
    """Tensors of steps: those of padded shapes are allocated once and never move, those of larger ones when a step first needs so
    much.
    """

    def __init__(self, cache: CacheShape, widths: Widths, dtype: torch.dtype, device: torch.device) -> None:
        self.cache = cache
        self._widths = widths
        self._dtype = dtype
        self._device = device
        self._slots = HostSlots.on(device)
        self._captured = self._allocate(CAPTURED)
        self._large: tuple[InputBuffers, ActivationBuffers] | None = None
        self._steps: dict[StepShape, Step] = {}

    def step(self, shape: StepShape) -> Step:
        """For a step of ``shape``."""
        if shape.is_large:
            return _step(shape, *self._room_for(shape))
        if shape not in self._steps:
            self._steps[shape] = _step(shape, *self._captured)
        return self._steps[shape]

    def _room_for(self, shape: StepShape) -> tuple[InputBuffers, ActivationBuffers]:
        """That of earlier large steps, if it is enough. What is too small is freed before more is taken."""
        held = StepShape(0, 0) if self._large is None else self._large[0].max_shape
        if self._large is None or shape.tokens > held.tokens or shape.requests > held.requests:
            self._large = None
            wanted = zip((held.tokens, held.requests), (shape.tokens, shape.requests), strict=True)
            self._large = self._allocate(StepShape(*(_whole(max(one, other)) for one, other in wanted)))
        return self._large

    @torch.inference_mode(False)
    def _allocate(self, shape: StepShape) -> tuple[InputBuffers, ActivationBuffers]:
        inputs = InputBuffers(shape, self.cache.num_groups, self.cache.max_blocks, self._slots, self._device)
        return inputs, ActivationBuffers(shape, self._widths, self._dtype, self._device)


def _step(shape: StepShape, inputs: InputBuffers, activations: ActivationBuffers) -> Step:
    return Step(shape, inputs, inputs.of(shape), activations.of(shape))


def _whole(count: int) -> int:
    """The next multiple of the largest padded size, so that steps of slowly growing sizes do not allocate each time."""
    return -(-count // MAX_CAPTURED_TOKENS) * MAX_CAPTURED_TOKENS


# Hidden states that steps give beside their logits, in memory that never moves where steps are replayed.


class KeptHidden:
    """Those of ``layers``, as ``ForwardPass.keep_hidden`` counts them, ``[tokens, layers * width]``."""

    def __init__(self, layers: Sequence[int], width: int, dtype: torch.dtype, device: torch.device) -> None:
        self.layers = tuple(layers)
        self._width = width
        with torch.inference_mode(False):
            self._captured = torch.zeros(CAPTURED.tokens, len(layers) * width, dtype=dtype, device=device)
        self._rows = self._captured

    def begin(self, num_tokens: int) -> None:
        """A step of so many tokens, padding included: those of padded shapes have the same memory each time."""
        fits = num_tokens <= len(self._captured)
        self._rows = (
            self._captured[:num_tokens] if fits else self._captured.new_empty(num_tokens, len(self._captured[0]))
        )

    def put(self, layer: int, states: torch.Tensor) -> None:
        """What comes into ``layer``: ``[tokens, width]``."""
        for place, kept in enumerate(self.layers):
            if kept == layer:
                self._rows[:, place * self._width : (place + 1) * self._width].copy_(states)

    def put_all(self, states: torch.Tensor) -> None:
        """Those of all layers, side by side."""
        self._rows.copy_(states)

    def of(self, num_tokens: int) -> torch.Tensor:
        """Of the first tokens of the step that ran last, in memory of their own."""
        rows = self._rows if num_tokens > len(self._captured) else self._captured
        return rows[:num_tokens].clone()
