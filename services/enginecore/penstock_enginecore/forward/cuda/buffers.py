"""Device tensors of the fused decoder that keep their addresses, and the copy of a step's inputs into them.

A step's inputs are arranged in page-locked host memory and reach the device in one copy. On the device, the inputs are
then copied to the tensors that kernels read. There are two host slots, so the host can write one slot while the other
slot is still being copied.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from penstock_enginecore.attention.base import IntArray
from penstock_enginecore.forward.base import FedTokens, ForwardBatch
from penstock_enginecore.forward.cuda.kernel_api import Draws, GroupInputs, MediaInputs
from penstock_enginecore.sample.base import PlainDraws

MAX_CAPTURED_TOKENS = 512
"""Number of tokens, and of requests, up to which all steps are padded and can be captured."""
LARGE_CAPTURED_TOKENS = (1024, 2048)
"""Numbers of tokens of larger steps that can be captured. With queued prompts, most steps have exactly
``scheduler.max_num_batched_tokens`` tokens, which are 2048 by default.
"""
_LARGE_PADDING = 32
"""Steps are padded to a number of ``LARGE_CAPTURED_TOKENS`` if at most one of this many tokens is padding. Large steps
are bound by computation, so more padding would take longer than launching the kernels.
"""
_MIXED_TOKENS = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 320, 384, 448, MAX_CAPTURED_TOKENS)
"""Numbers of tokens to which steps with more tokens than requests are padded."""
_MIXED_REQUESTS = (16, 64, 256, MAX_CAPTURED_TOKENS)
"""Numbers of requests to which steps with more tokens than requests are padded."""
_LARGE_MULTIPLE = 16
"""Triton compiles a kernel again for arguments that are multiples of 16, and for 1. With multiples alone, no kernel is
compiled at the first odd prompt.
"""
DRAW_DTYPES = (torch.float32, torch.int64, torch.int64, torch.float32, torch.int32, torch.float64)
"""Dtypes of the fields of ``Draws``, in order."""
_GREEDY = (0.0, 0, 0, math.inf, 0, 1.0)
"""Values of the fields of ``Draws`` for greedy rows and padding rows."""
_NUM_DRAWS = len(DRAW_DTYPES)
_NONE: IntArray = np.zeros(0, dtype=np.int64)
_UNDRAWN = (_NONE,) * _NUM_DRAWS
ALIGNMENT = 256
"""Alignment of each tensor in bytes. CUDA's own allocations have this alignment, and vector loads need an aligned
address.
"""


@dataclass(frozen=True, slots=True)
class StepShape:
    """Sizes of a step's tensors.

    Attributes:
        tokens: Number of tokens.
        requests: Number of requests, which is also the number of rows that get logits.
        decodes_only: Whether each request has one new token; see ``GroupInputs``.
    """

    tokens: int
    requests: int
    decodes_only: bool = False

    @property
    def is_large(self) -> bool:
        """Whether the shape is too large to be padded and captured."""
        is_captured = self.tokens <= MAX_CAPTURED_TOKENS or self.tokens in LARGE_CAPTURED_TOKENS
        return self.requests > MAX_CAPTURED_TOKENS or not is_captured


CAPTURED = StepShape(LARGE_CAPTURED_TOKENS[-1], MAX_CAPTURED_TOKENS)
"""Largest padded shape."""


def shape_of(batch: ForwardBatch, rows: IntArray) -> StepShape:
    """Return the padded shape of a step whose tokens with the indices ``rows`` get logits."""
    shape = padded_shape(len(batch.token_ids), max(batch.attention[0].num_requests, len(rows)))
    return replace(shape, decodes_only=batch.attention[0].decodes_only)


def padded_shape(tokens: int, requests: int) -> StepShape:
    """Return the padded shape of a step with ``tokens`` tokens and ``requests`` requests.

    If each request has one token, tokens and requests are padded to a power of two up to 16, then to a multiple of 16,
    and above 256 to a multiple of 32. Otherwise tokens are padded to a number of ``_MIXED_TOKENS``, and requests to a
    number of ``_MIXED_REQUESTS``, so that steps with prompts have few shapes and all of them can be captured at start.
    Steps with more than ``MAX_CAPTURED_TOKENS`` tokens are padded only to slightly larger numbers of
    ``LARGE_CAPTURED_TOKENS``. In other steps of this size, and in steps with more requests, both numbers are padded to
    a multiple of ``_LARGE_MULTIPLE``.
    """
    if requests > MAX_CAPTURED_TOKENS:
        return _uncaptured(tokens, requests)
    if requests >= tokens:
        return StepShape(_padded(tokens), _padded(requests))
    padded = next((count for count in (*_MIXED_TOKENS, *LARGE_CAPTURED_TOKENS) if count >= tokens), tokens)
    is_large, padding = tokens > MAX_CAPTURED_TOKENS, padded - tokens
    if padded > CAPTURED.tokens or (is_large and padding > padded // _LARGE_PADDING):
        return _uncaptured(tokens, requests)
    return StepShape(padded, min(padded, next(count for count in _MIXED_REQUESTS if count >= requests)))


def _uncaptured(tokens: int, requests: int) -> StepShape:
    tokens, requests = (-(-count // _LARGE_MULTIPLE) * _LARGE_MULTIPLE for count in (tokens, requests))
    return StepShape(tokens, requests)


def decode_sizes(most: int) -> list[int]:
    """Return the numbers of tokens of all padded shapes of decode steps with up to ``most`` requests, in ascending
    order.
    """
    return sorted({_padded(count) for count in range(1, min(most, MAX_CAPTURED_TOKENS) + 1)})


def mixed_steps(most_tokens: int, most_requests: int) -> list[StepShape]:
    """Return one step of each padded shape of steps that have more tokens than requests. The steps are not padded.

    Args:
        most_tokens: Maximum number of tokens of a step.
        most_requests: Maximum number of requests of a step.
    """
    sizes = [count for before, count in itertools.pairwise((0, *_MIXED_TOKENS)) if before < most_tokens and count > 1]
    sizes += [count for count in LARGE_CAPTURED_TOKENS if count - count // _LARGE_PADDING <= most_tokens]
    requests = [count for before, count in itertools.pairwise((0, *_MIXED_REQUESTS)) if before < most_requests]
    return list(dict.fromkeys(StepShape(count, min(rows, count - 1)) for count in sizes for rows in requests))


def _padded(count: int) -> int:
    if count <= 16:
        return 1 << (count - 1).bit_length()
    step = 16 if count <= 256 else 32
    return -(-count // step) * step


@dataclass(frozen=True, slots=True)
class FedInputs:
    """Tensors ``[tokens]`` that tell a step which input tokens only the device has, because it sampled them.

    Attributes:
        known: bool, whether the device has sampled the token.
        rows: int64, the request row whose newest token this is.
        ids: int32, scratch memory for the token ids.
    """

    known: torch.Tensor
    rows: torch.Tensor
    ids: torch.Tensor


@dataclass(frozen=True, slots=True)
class StepInputs:
    """Kernel inputs of a step, on the device.

    Attributes:
        token_ids: int32 ``[tokens]``.
        positions: int32 ``[tokens]``.
        rope_positions: int32 ``[3, tokens]``, see ``ForwardBatch``, or None if ``InputBuffers`` has no sections.
        media: Media inputs of the step, or None. Captured steps have None.
        rows: int32 ``[requests]``, indices of the tokens that get logits.
        groups: Positions of the tokens in each KV cache group.
        fed: Tokens that the device has sampled.
        draws: Sampling parameters of the rows of logits.
        kept_rows: int64 ``[requests]``, indices of the request rows that receive the sampled tokens.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    rows: torch.Tensor
    groups: tuple[GroupInputs, ...]
    fed: FedInputs
    draws: Draws
    kept_rows: torch.Tensor
    rope_positions: torch.Tensor | None = None
    media: MediaInputs | None = None


class InputBuffers:
    """Input tensors of steps up to ``max_shape``.

    Args:
        max_shape: Shape of the largest step.
        num_groups: Number of KV cache groups.
        max_blocks: Maximum number of blocks of a sequence in each group.
        slots: Host memory for the copies.
        sections: Whether steps have rotary positions in sections.
    """

    def __init__(
        self,
        max_shape: StepShape,
        num_groups: int,
        max_blocks: int,
        slots: "HostSlots",
        device: torch.device,
        *,
        sections: bool = False,
    ) -> None:
        self.max_shape = max_shape
        self._sections = sections
        self._slots = slots
        tokens, requests = max_shape.tokens, max_shape.requests
        of_all = [(length, torch.int32) for length in (tokens, tokens, requests, requests + 1, requests)]
        of_fed = [(tokens, torch.bool), (tokens, torch.int64)]
        of_choice = [(requests, dtype) for dtype in (*DRAW_DTYPES, torch.int64)]
        of_rope = [(3 * tokens if sections else 0, torch.int32)]
        self._layout = VectorLayout([*of_all, *of_rope, *of_fed, *of_choice, *[(tokens, torch.int64)] * num_groups])
        self._flat = torch.zeros(self._layout.num_bytes, dtype=torch.uint8, device=device)
        self._views = self._layout.views(self._flat)
        self._fed_ids = torch.zeros(tokens, dtype=torch.int32, device=device)
        self._tables = [torch.zeros(requests, max_blocks, dtype=torch.int32, device=device) for _ in range(num_groups)]

    def of(self, shape: StepShape) -> StepInputs:
        """Return the tensors for a step of ``shape``. Each call returns tensors in the same memory."""
        tokens, requests, only = shape.tokens, shape.requests, shape.decodes_only
        token_ids, positions, rows, starts, seq_lens, rope, known, fed_rows, *others = self._views
        draws, kept_rows, slots = others[:_NUM_DRAWS], others[_NUM_DRAWS], others[_NUM_DRAWS + 1 :]
        return StepInputs(
            token_ids[:tokens],
            positions[:tokens],
            rows[:requests],
            tuple(
                GroupInputs(
                    table[:requests], starts[: requests + 1], seq_lens[:requests], slot[:tokens], decodes_only=only
                )
                for table, slot in zip(self._tables, slots, strict=True)
            ),
            FedInputs(known[:tokens], fed_rows[:tokens], self._fed_ids[:tokens]),
            Draws(*(vector[:requests] for vector in draws)),
            kept_rows[:requests],
            rope[: 3 * tokens].view(3, tokens) if self._sections else None,
        )

    def load(self, batch: ForwardBatch, rows: IntArray, shape: StepShape, nobody: int = 0) -> None:
        """Start copying a step to the device, padded to ``shape``. Does not wait for the copies.

        ``nobody`` is the request row that receives the tokens of padding rows. This row belongs to no request.
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
        if self._sections:
            rope = views[5][: 3 * shape.tokens].reshape(3, shape.tokens)
            rope[:, : len(batch.positions)] = batch.positions if batch.rope_positions is None else batch.rope_positions
            rope[:, len(batch.positions) :] = 0
        _lay_out_fed(views[6:8], batch.fed, shape)
        *draws, kept_rows = views[8 : 9 + _NUM_DRAWS]
        chosen = _UNDRAWN if batch.choice is None else draw_values(batch.choice.draws)
        for view, values, neutral in zip(draws, chosen, _GREEDY, strict=True):
            _fill(view, values, shape.requests, neutral)
        _fill(kept_rows, _NONE if batch.choice is None else batch.choice.kept_rows, shape.requests, nobody)
        for view, metadata in zip(views[9 + _NUM_DRAWS :], attention, strict=True):
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
    """Two host slots that are used alternately, and the device memory to which they are copied."""

    def __init__(self, slots: tuple["HostSlot", "HostSlot"]) -> None:
        self._next, self._last = slots

    @classmethod
    def on(cls, device: torch.device) -> "HostSlots":
        """Return two slots for copies to ``device``."""
        make_event = torch.cuda.Event if device.type == "cuda" else None
        return cls((HostSlot(device, make_event), HostSlot(device, make_event)))

    def take(self, num_bytes: int) -> "HostSlot":
        """Return the next slot, with at least ``num_bytes`` bytes. Waits until the slot's last copy has finished."""
        self._next, self._last = self._last, self._next
        self._last.reserve(num_bytes)
        return self._last


class HostSlot:
    """Host memory that is the source of one copy, and device memory that is the target.

    Args:
        make_event: Creates an event that marks the end of a copy, or None if copies are synchronous. With events the
            memory is page-locked, because copies from pageable memory are synchronous.
    """

    def __init__(self, device: torch.device, make_event: Callable[[], Any] | None) -> None:
        self.memory = torch.empty(0, dtype=torch.uint8)
        self._device = device
        self._event = None if make_event is None else make_event()
        self._arrived = torch.empty(0, dtype=torch.uint8, device=device)

    def reserve(self, num_bytes: int) -> None:
        """Wait for the slot's last copy, and make the slot at least ``num_bytes`` bytes large."""
        if self._event is not None:
            self._event.synchronize()
        if len(self.memory) < num_bytes:
            size = 1 << (num_bytes - 1).bit_length()
            self.memory = torch.empty(size, dtype=torch.uint8, pin_memory=self._device.type == "cuda")
            self._arrived = torch.empty(size, dtype=torch.uint8, device=self._device)

    def send(self, num_bytes: int) -> torch.Tensor:
        """Start copying the first ``num_bytes`` bytes of the slot. Returns a uint8 tensor on the device, which work
        queued later on the stream can read.
        """
        self._arrived[:num_bytes].copy_(self.memory[:num_bytes], non_blocking=True)
        if self._event is not None:
            self._event.record()
        return self._arrived[:num_bytes]


class VectorLayout:
    """Layout of vectors in one piece of memory, given their lengths and dtypes."""

    def __init__(self, vectors: Sequence[tuple[int, torch.dtype]]) -> None:
        self._parts: list[tuple[int, int, torch.dtype]] = []
        start = 0
        for length, dtype in vectors:
            num_bytes = length * dtype.itemsize
            self._parts.append((start, start + num_bytes, dtype))
            start += -(-num_bytes // ALIGNMENT) * ALIGNMENT
        self.num_bytes = start

    def views(self, memory: torch.Tensor) -> list[torch.Tensor]:
        """Return the vectors as views of ``memory``, a uint8 tensor of at least ``num_bytes`` bytes."""
        return [memory[start:end].view(dtype) for start, end, dtype in self._parts]


def to_device(vectors: Sequence[tuple[npt.NDArray[Any], torch.dtype]], device: torch.device) -> list[torch.Tensor]:
    """Return ``vectors``, converted to the given dtypes, on ``device``. All vectors use one copy. Does not wait for the
    copy.
    """
    layout = VectorLayout([(len(vector), dtype) for vector, dtype in vectors])
    host = torch.empty(layout.num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
    for view, (vector, _) in zip(layout.views(host), vectors, strict=True):
        view.numpy()[:] = vector
    return layout.views(host.to(device, non_blocking=True))


def draw_values(draws: PlainDraws) -> tuple[npt.NDArray[Any], ...]:
    """Return the values of ``Draws`` on the host, in the order of ``DRAW_DTYPES``."""
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
    """Write ``values``, followed by ``padding``, to the first ``length`` elements of ``view``."""
    view[: len(values)] = values
    view[len(values) : length] = padding


# Activation memory of the fused decoder's layers.
#
# Attention and MLP never need their buffers at the same time, so they share memory.


@dataclass(frozen=True, slots=True)
class Widths:
    """Number of elements per token of each kind of activation.

    Attributes:
        hidden: Number of elements of a hidden state.
        qkv: Number of elements of the queries, keys and values of all heads.
        attended: Number of elements of the attention output of all query heads.
        intermediate: Number of activations inside the MLP.
        vocab: Number of logits.
    """

    hidden: int
    qkv: int
    attended: int
    intermediate: int
    vocab: int


@dataclass(frozen=True, slots=True)
class Activations:
    """Activations of a step. Most tensors are ``[tokens, width]``. ``chosen`` (hidden states of the rows that get
    logits) and ``logits`` are ``[requests, width]``.

    ``x`` and ``normed`` may swap roles. ``query`` and ``attended`` share memory with ``gate_up`` and ``gated``.
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
    """Activation memory of steps up to ``max_shape``. The memory initially contains zeros. Later, padding rows contain
    values of earlier steps, which are never used.
    """

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
        """Return the tensors for a step of ``shape``. Each call returns tensors in the same memory."""
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


# Memory of the fused decoder's steps: input tensors and activations.


@dataclass(frozen=True, slots=True)
class CacheShape:
    """Properties of a KV cache that determine the sizes of a step's input tensors.

    Attributes:
        num_groups: Number of KV cache groups.
        max_blocks: Maximum number of blocks of a sequence in one group.
    """

    num_groups: int
    max_blocks: int


@dataclass(frozen=True, slots=True)
class Step:
    """Tensors of steps of ``shape``. All padded steps of one shape use the same memory. ``buffers`` copies the inputs
    to the device.
    """

    shape: StepShape
    buffers: InputBuffers
    inputs: StepInputs
    activations: Activations


class StepMemory:
    """Tensors of steps.

    Tensors of padded shapes are allocated once and never move. Tensors of larger shapes are allocated when a step needs
    them.
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
        """Return the tensors of a step of ``shape``."""
        if shape.is_large:
            return _step(shape, *self._room_for(shape))
        if shape not in self._steps:
            self._steps[shape] = _step(shape, *self._captured)
        return self._steps[shape]

    def _room_for(self, shape: StepShape) -> tuple[InputBuffers, ActivationBuffers]:
        """Return the memory for a step that is too large to be captured, or has no captured shape.

        The memory of captured steps is used if it is large enough. Otherwise, the memory of the previous large step is
        reused if it is large enough, or freed before the new allocation.
        """
        if shape.tokens <= CAPTURED.tokens and shape.requests <= CAPTURED.requests:
            return self._captured
        held = StepShape(0, 0) if self._large is None else self._large[0].max_shape
        if self._large is None or shape.tokens > held.tokens or shape.requests > held.requests:
            self._large = None
            tokens, requests = max(shape.tokens, held.tokens), max(shape.requests, held.requests)
            self._large = self._allocate(StepShape(_whole(tokens), _whole(requests)))
        return self._large

    @torch.inference_mode(False)
    def _allocate(self, shape: StepShape) -> tuple[InputBuffers, ActivationBuffers]:
        inputs = InputBuffers(shape, self.cache.num_groups, self.cache.max_blocks, self._slots, self._device)
        return inputs, ActivationBuffers(shape, self._widths, self._dtype, self._device)


def _step(shape: StepShape, inputs: InputBuffers, activations: ActivationBuffers) -> Step:
    return Step(shape, inputs, inputs.of(shape), activations.of(shape))


def _whole(count: int) -> int:
    """Return ``count`` rounded up to a multiple of ``MAX_CAPTURED_TOKENS``, so that slowly growing steps do not
    allocate each time.
    """
    return -(-count // MAX_CAPTURED_TOKENS) * MAX_CAPTURED_TOKENS


# Hidden states of selected layers, which steps return with their logits. The memory for replayed steps never moves.


class KeptHidden:
    """Memory for the hidden states of ``layers``, ``[tokens, layers * width]``. Layers are numbered as in
    ``ForwardPass.keep_hidden``.
    """

    def __init__(self, layers: Sequence[int], width: int, dtype: torch.dtype, device: torch.device) -> None:
        self.layers = tuple(layers)
        self._width = width
        with torch.inference_mode(False):
            self._captured = torch.zeros(CAPTURED.tokens, len(layers) * width, dtype=dtype, device=device)
        self._rows = self._captured

    def begin(self, num_tokens: int) -> None:
        """Start a step of ``num_tokens`` tokens, including padding. All steps of padded shapes use the same memory."""
        fits = num_tokens <= len(self._captured)
        self._rows = (
            self._captured[:num_tokens] if fits else self._captured.new_empty(num_tokens, len(self._captured[0]))
        )

    def put(self, layer: int, states: torch.Tensor) -> None:
        """Store ``states`` ``[tokens, width]``, the input of ``layer``, if ``layer`` is one of the selected layers."""
        for place, kept in enumerate(self.layers):
            if kept == layer:
                self._rows[:, place * self._width : (place + 1) * self._width].copy_(states)

    def put_all(self, states: torch.Tensor) -> None:
        """Store the hidden states of all selected layers, concatenated in the last dimension."""
        self._rows.copy_(states)

    def of(self, num_tokens: int) -> torch.Tensor:
        """Return a copy of the hidden states of the last step's first ``num_tokens`` tokens."""
        rows = self._rows if num_tokens > len(self._captured) else self._captured
        return rows[:num_tokens].clone()
