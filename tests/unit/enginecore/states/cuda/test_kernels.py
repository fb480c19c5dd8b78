"""Kernels of recurrent layers in Triton's interpreter equal the recurrence, token by token, from any start and in any parts."""

import itertools
import os
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from penstock_enginecore.forward.cuda.buffers import StepShape
from penstock_enginecore.forward.cuda.states import StateBuffers
from penstock_enginecore.states.base import ConvCall, ScanCall, SequenceStep, StateMetadata
from penstock_enginecore.states.core.spec import SPAN, StatePoolConfig, StateSpec, StateStep
from penstock_enginecore.states.cuda.context import TritonStates
from penstock_enginecore.states.cuda.indices import StateIndices, is_decode
from penstock_enginecore.states.memory import StateMemory
from penstock_enginecore.states.reference import ReferenceStates, recurrent
from tests.fakes.models.interpreted_kernels import interpreted
from tests.unit.enginecore.states.test_rows import (
    CHANNELS,
    DEVICE,
    HEADS,
    KERNEL,
    KEY_SIZE,
    MIXER,
    SPEC,
    VALUE_SIZE,
    Sequences,
    _joined,
    _whole,
    conv_call,
    part_of,
    scan_call,
    torch_form,
)

kernels = interpreted("triton_kernels", "penstock_enginecore.states.cuda").TritonStateKernels()

KINDS = pytest.mark.parametrize("corrects", [True, False], ids=["delta rule", "state space duality"])
INFINITE = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
"""The interpreter computes with numpy, which warns about infinities. GPUs do not."""
SHORT = StateSpec(channels=CHANNELS, kernel=KERNEL, input_size=4)


class Interpreted(Sequences):
    """Requests whose steps the interpreted kernels compute. ``indices`` are those of the last step."""

    indices: StateIndices

    def __init__(self, num_requests: int, rows: int, spec: StateSpec = SPEC) -> None:
        super().__init__(torch_form, num_requests, rows, spec)

    def step(self, tokens: Sequence[tuple[int, int, int]]) -> TritonStates:
        step = self.metadata(tokens)
        self.indices = StateIndices.of(step, sum(count for *_, count in tokens), DEVICE)
        return TritonStates(kernels, {MIXER: self.layer}, self.indices, None, DEVICE)


class Padded(Sequences):
    """Requests whose steps run on tensors that never move, padded to ``SHAPE``."""

    SHAPE = StepShape(48, 6)

    def __init__(self, num_requests: int, rows: int) -> None:
        super().__init__(torch_form, num_requests, rows)
        self.buffers = StateBuffers(self.SHAPE, DEVICE)

    def step(self, tokens: Sequence[tuple[int, int, int]]) -> TritonStates:
        step = self.metadata(tokens)
        self.buffers.load(step, sum(count for *_, count in tokens), self.SHAPE)
        indices = self.buffers.of(self.SHAPE, decodes=is_decode(step))
        return TritonStates(kernels, {MIXER: self.layer}, indices, None, DEVICE)


def check_length(start: int, length: int, *, corrects: bool) -> None:
    """Compute ``start`` tokens in one step, ``length`` in a second, and one in a third."""
    call = scan_call(start + length + 1, corrects=corrects, seed=start)
    expected, _ = recurrent(call, torch.zeros(HEADS, KEY_SIZE, VALUE_SIZE))
    sequences = Interpreted(1, SPAN)
    for first, end in itertools.pairwise(sorted({0, start, start + length, start + length + 1})):
        output = sequences.step([(0, first, end - first)]).scan(part_of(call, first, end))
        torch.testing.assert_close(output, expected[first:end], rtol=1e-5, atol=1e-5)
    assert not sequences.indices.broken.any()


@KINDS
@pytest.mark.parametrize(
    ("start", "length"), [(0, 1), (0, 200), (1, 15), (7, 40), (15, 1), (15, 17), (16, 16), (31, 33)]
)
def test_lengths_after_starts_equal_the_recurrence(start: int, length: int, *, corrects: bool) -> None:
    check_length(start, length, corrects=corrects)


@pytest.mark.slow
@KINDS
@pytest.mark.parametrize("start", range(32) if os.environ.get("PENSTOCK_RECURRENT") == "full" else (15, 17))
def test_every_length_after_every_start_equals_the_recurrence(start: int, *, corrects: bool) -> None:
    for length in (*range(1, 34), 47, 48, 49, 63, 64, 65, 127, 128, 129, 199, 200):
        check_length(start, length, corrects=corrects)


@KINDS
def test_sizes_of_models_equal_the_recurrence(*, corrects: bool) -> None:
    """Uses several blocks of columns, the last one in part, keys of a size that is no power of two, and shared keys."""
    spec = StateSpec(
        channels=CHANNELS, kernel=KERNEL, input_size=4, num_heads=3, num_key_heads=1, key_size=72, value_size=80
    )
    generator = torch.Generator().manual_seed(3)
    key = torch.nn.functional.normalize(torch.randn(40, 1, 72, generator=generator), dim=-1)
    query, value = torch.randn(40, 1, 72, generator=generator), torch.randn(40, 3, 80, generator=generator)
    beta = torch.rand(40, 3, generator=generator) if corrects else None
    call = ScanCall(MIXER, query, key, value, -torch.rand(40, 3, generator=generator), beta)
    expected, state = recurrent(call, torch.zeros(3, 72, 80))
    sequences = Interpreted(1, SPAN, spec)
    for first, end in itertools.pairwise((0, 1, 18, 31, 32, 40)):
        output = sequences.step([(0, first, end - first)]).scan(part_of(call, first, end))
        torch.testing.assert_close(output, expected[first:end], rtol=1e-5, atol=1e-5)
    _, state = recurrent(part_of(call, 0, 32), torch.zeros(3, 72, 80))
    torch.testing.assert_close(sequences.layer.closed[sequences.slot(0, 32)], state, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("form", [Interpreted, Padded])
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)])
@KINDS
def test_ragged_steps_of_any_size_equal_the_recurrence(
    form: type[Interpreted | Padded], seed: int, *, corrects: bool
) -> None:
    rng = random.Random(seed)
    lengths = [70, 37, 5]
    scans = [scan_call(n, corrects=corrects, seed=10 * seed + i) for i, n in enumerate(lengths)]
    convs = [conv_call(n, seed=0) for n in lengths]
    expected = [recurrent(call, torch.zeros(HEADS, KEY_SIZE, VALUE_SIZE))[0] for call in scans]
    alone = [ReferenceStates(StateMetadata.alone(*_whole(len(c.inputs)))).convolve(c) for c in convs]
    sequences, done = form(len(lengths), SPAN), [0] * len(lengths)
    while any(n < length for n, length in zip(done, lengths, strict=True)):
        sizes = [0, 1, 1, 7, 17] if min(done) else [1, 16]
        wanted = [(i, done[i], min(rng.choice(sizes), lengths[i] - done[i])) for i in range(len(lengths))]
        if not (tokens := [each for each in wanted if each[2]]):
            continue
        step = sequences.step(tokens)
        total = sum(count for *_, count in tokens)
        padding = (Padded.SHAPE.tokens if form is Padded else total) - total
        inputs = _padded(torch.cat([convs[i].inputs[start : start + n] for i, start, n in tokens]), padding)
        convolved = step.convolve(ConvCall(MIXER, inputs, convs[0].weight, convs[0].bias, "silu"))
        joined = _joined([part_of(scans[i], start, start + n) for i, start, n in tokens])
        parts = (joined.query, joined.key, joined.value, joined.decay, joined.beta)
        output = step.scan(ScanCall(MIXER, *(None if x is None else _padded(x, padding) for x in parts)))  # type: ignore[arg-type]
        assert not output[total:].any(), "padding tokens have results"
        assert convolved.isfinite().all()
        first = 0
        for i, start, count in tokens:
            rows = slice(first, first + count)
            torch.testing.assert_close(output[rows], expected[i][start : start + count], rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(convolved[rows], alone[i][start : start + count], rtol=1e-5, atol=1e-5)
            done[i] += count
            first += count


def _padded(rows: torch.Tensor, count: int) -> torch.Tensor:
    """Append rows of NaN, which no result may use."""
    return torch.cat([rows, rows.new_full((count, *rows.shape[1:]), torch.nan)])


def test_bits_do_not_depend_on_how_a_prompt_is_cut() -> None:
    call, conv = scan_call(35, corrects=True), conv_call(35)
    results = []
    for cuts in ((0, 35), (0, 1, 2, 3, 20, 33, 35), (0, 15, 31, 35), tuple(range(36))):
        sequences, outputs = Interpreted(1, SPAN), []
        for first, end in itertools.pairwise(cuts):
            step = sequences.step([(0, first, end - first)])
            convolved = step.convolve(ConvCall(MIXER, conv.inputs[first:end], conv.weight, conv.bias, "silu"))
            outputs.append(torch.cat([convolved, step.scan(part_of(call, first, end)).flatten(1)], 1))
        results.append((torch.cat(outputs), sequences.layer.closed[sequences.slot(0, 32)]))
    assert all(torch.equal(x, y) for result in results[1:] for x, y in zip(result, results[0], strict=True))


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(n, marks=pytest.mark.slow) for n in range(2, 20))])
def test_rejected_drafts_leave_no_trace(seed: int) -> None:
    rng = random.Random(seed)
    call, wrong = (
        scan_call(80, corrects=seed % 2 == 0, seed=seed),
        scan_call(80, corrects=seed % 2 == 0, seed=seed + 1000),
    )
    convs, wrong_convs = conv_call(80, seed=0), conv_call(80, seed=1)
    expected, _ = recurrent(call, torch.zeros(HEADS, KEY_SIZE, VALUE_SIZE))
    alone = ReferenceStates(StateMetadata.alone(*_whole(80))).convolve(convs)
    sequences, done = Interpreted(1, 2 * SPAN), rng.randrange(1, 17)
    first = sequences.step([(0, 0, done)])
    first.convolve(ConvCall(MIXER, convs.inputs[:done], convs.weight, convs.bias, "silu"))
    first.scan(part_of(call, 0, done))
    while done < 60:
        drafts = rng.choice([0, 1, 3, 15])
        good = rng.randint(0, drafts)
        start, right, end = done, done + 1 + good, done + 1 + drafts
        step = sequences.step([(0, start, 1 + drafts)])
        inputs = torch.cat([convs.inputs[start:right], wrong_convs.inputs[right:end]])
        convolved = step.convolve(ConvCall(MIXER, inputs, convs.weight, convs.bias, "silu"))
        output = step.scan(_joined([part_of(call, start, right), part_of(wrong, right, end)]))
        kept = slice(0, 1 + good)
        torch.testing.assert_close(output[kept], expected[start:right], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(convolved[kept], alone[start:right], rtol=1e-5, atol=1e-5)
        done = right


def test_only_the_listed_slots_and_the_last_rows_are_written() -> None:
    sequences = Interpreted(3, SPAN)
    before = [tensor.clone() for tensor in sequences.layer.tensors()]
    step = sequences.step([(0, 0, 40), (2, 0, 5)])
    step.convolve(conv_call(45))
    step.scan(scan_call(45, corrects=True))
    changed = [
        {i for i, rows in enumerate(zip(old, new, strict=True)) if not torch.equal(*(x.nan_to_num(7e8) for x in rows))}
        for old, new in zip(before, sequences.layer.tensors(), strict=True)
    ]
    tails, inputs, closed, keys, updates, decays = changed
    assert tails == closed == {sequences.slot(0, 32)}
    assert inputs == keys == updates == decays == {0, 2}
    assert sequences.layer.keys[2, :5].isfinite().all()
    assert sequences.layer.keys[2, 5:].isnan().all()


def test_states_between_the_ends_of_a_step_are_written_to_their_slots() -> None:
    sequences, call = Interpreted(3, SPAN), scan_call(50, corrects=True)
    state = StateStep(0, 0, [(16, 5), (48, 2)])
    metadata = StateMetadata([SequenceStep(0, 0, 50, state)])
    step = TritonStates(kernels, {MIXER: sequences.layer}, StateIndices.of(metadata, 50, DEVICE), None, DEVICE)
    conv = conv_call(50)
    step.convolve(conv)
    step.scan(call)
    for end, slot in state.writes:
        _, expected = recurrent(part_of(call, 0, end), torch.zeros(HEADS, KEY_SIZE, VALUE_SIZE))
        torch.testing.assert_close(sequences.layer.closed[slot], expected, rtol=1e-5, atol=1e-5)
        assert torch.equal(sequences.layer.tails[slot], conv.inputs[end - KERNEL + 1 : end])


@INFINITE
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_requests_whose_new_state_is_not_finite_are_reported(bad: float) -> None:
    sequences = Interpreted(3, SPAN)
    call = scan_call(60, corrects=True)
    call.value[25] = bad
    call.value[57] = bad  # belongs to no state yet
    output = sequences.step([(0, 0, 20), (1, 0, 20), (2, 0, 20)]).scan(call)
    assert sequences.indices.broken.tolist() == [0, 1, 0]
    expected, _ = recurrent(part_of(call, 20, 25), torch.zeros(HEADS, KEY_SIZE, VALUE_SIZE))
    torch.testing.assert_close(output[20:25], expected, rtol=1e-5, atol=1e-5)


@INFINITE
def test_a_token_that_ends_a_span_reports_a_state_that_is_not_finite() -> None:
    sequences, call = Interpreted(2, SPAN), scan_call(32, corrects=False)
    for position in range(16):
        parts = [part_of(call, position, position + 1), part_of(call, 16 + position, 17 + position)]
        if position == 3:
            parts[1].value.fill_(torch.inf)
        sequences.step([(0, position, 1), (1, position, 1)]).scan(_joined(parts))
        assert sequences.indices.broken.tolist() == ([0, 1] if position == 15 else [0, 0])


@INFINITE
def test_requests_whose_new_inputs_of_a_short_convolution_are_not_finite_are_reported() -> None:
    pool = StatePoolConfig(num_slots=7, num_requests=3, rows_per_request=SPAN, interval=SPAN)
    layer = StateMemory({"": SHORT}, torch.float32, DEVICE).allocate(pool)[""]
    states = [StateStep(0, 0, [(16, 1)]), StateStep(1, 0, [(16, 3)]), StateStep(2, 0)]
    step = StateMetadata([SequenceStep(20 * i, 0, count, states[i]) for i, count in enumerate((20, 20, 5))])
    indices = StateIndices.of(step, 45, DEVICE)
    call = conv_call(45)
    call.inputs[35] = torch.inf  # the last input before the second request's state
    call.inputs[42] = torch.nan  # belongs to no state yet
    TritonStates(kernels, {MIXER: layer}, indices, None, DEVICE).convolve(call)
    assert indices.broken.tolist() == [0, 1, 0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("taps", [2, 3, 8])
def test_convolutions_in_16_bits_equal_those_of_torch(dtype: torch.dtype, taps: int) -> None:
    """Rounds as the torch form does: sums to the dtype of the weight, then the activation."""
    spec = StateSpec(channels=70, kernel=taps, input_size=2)
    sequences = Interpreted(1, SPAN, spec)
    layer = StateMemory({"": spec}, dtype, DEVICE).allocate(
        StatePoolConfig(num_slots=3, num_requests=1, rows_per_request=SPAN, interval=SPAN)
    )[""]
    sequences.layer = layer
    generator = torch.Generator().manual_seed(0)
    # Rows of a wider tensor, as a slice of a projection is.
    inputs = torch.randn(30, 90, generator=generator).to(dtype)[:, 5:75]
    weight = torch.randn(70, taps, generator=generator).to(dtype)
    call = ConvCall(MIXER, inputs, weight, None, "silu")
    expected = ReferenceStates(StateMetadata.alone(*_whole(30))).convolve(call)
    results = [
        sequences.step([(0, first, end - first)]).convolve(ConvCall(MIXER, inputs[first:end], weight, None, "silu"))
        for first, end in itertools.pairwise((0, 1, 2, 19, 30))
    ]
    found = torch.cat(results)
    assert found.dtype == dtype
    torch.testing.assert_close(found, expected, rtol=2 * torch.finfo(dtype).eps, atol=2 * torch.finfo(dtype).eps)


def test_shapes_that_do_not_fit_are_refused() -> None:
    sequences, call = Interpreted(1, SPAN), scan_call(3, corrects=True)
    step = sequences.step([(0, 0, 3)])
    narrow: Any = ScanCall(MIXER, call.query[:, :, :4], call.key[:, :, :4], call.value, call.decay, call.beta)
    with pytest.raises(ValueError, match=r"keys \[3, 2, 4\].*\(4, 2, 8, 6\)"):
        step.scan(narrow)
    conv = conv_call(3)
    with pytest.raises(ValueError, match=rf"the layer has {SPEC.channels} channels"):
        step.convolve(ConvCall(MIXER, conv.inputs[:, :4], conv.weight, None, None))
