"""The forms of recurrent layers, in torch and in kernels, equal the recurrence token by token, from any start and in any
parts.
"""

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from penstock_enginecore.attention.base import IntArray
from penstock_enginecore.native.library import open_library
from penstock_enginecore.native.states import NativeStates
from penstock_enginecore.states.base import ConvCall, ScanCall, SequenceStep, StateMetadata
from penstock_enginecore.states.core.spec import SPAN, StatePoolConfig, StateSpec, StateStep, span_start
from penstock_enginecore.states.memory import StateLayer, StateMemory
from penstock_enginecore.states.reference import ReferenceStates, recurrent
from penstock_enginecore.states.rows import RowStates
from tests.fakes.engines.instruction_sets import runnable

HEADS, KEY_HEADS, KEY_SIZE, VALUE_SIZE, CHANNELS, KERNEL = 4, 2, 8, 6, 10, 4
SPEC = StateSpec(
    channels=CHANNELS,
    kernel=KERNEL,
    input_size=4,
    num_heads=HEADS,
    num_key_heads=KEY_HEADS,
    key_size=KEY_SIZE,
    value_size=VALUE_SIZE,
)
MIXER = torch.nn.Module()
DEVICE = torch.device("cpu")
Form = Callable[[StateLayer, StateMetadata], Any]
"""Maker of a step's context from the memory of ``MIXER``."""


def torch_form(layer: StateLayer, step: StateMetadata) -> RowStates:
    return RowStates({MIXER: layer}, step, DEVICE)


def kernel_form(isa: str, threads: int = 2) -> Form:
    library = open_library(isa, threads)
    return lambda layer, step: NativeStates(library, {MIXER: layer}, step)


@pytest.fixture(scope="module", params=["torch", *runnable()])
def form(request: pytest.FixtureRequest) -> Form:
    return torch_form if request.param == "torch" else kernel_form(request.param)


def scan_call(tokens: int, *, corrects: bool, seed: int = 0) -> ScanCall:
    """Return random inputs of a scan. Keys have unit length, as in the delta rule."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(tokens, *shape, generator=generator)

    key = torch.nn.functional.normalize(normal(KEY_HEADS, KEY_SIZE), dim=-1)
    beta = torch.rand(tokens, HEADS, generator=generator) if corrects else None
    decay = -torch.rand(tokens, HEADS, generator=generator)
    return ScanCall(MIXER, normal(KEY_HEADS, KEY_SIZE), key, normal(HEADS, VALUE_SIZE), decay, beta)


def conv_call(tokens: int, seed: int = 0) -> ConvCall:
    generator = torch.Generator().manual_seed(seed)
    weight, bias = torch.randn(CHANNELS, KERNEL, generator=generator), torch.randn(CHANNELS, generator=generator)
    return ConvCall(MIXER, torch.randn(tokens, CHANNELS, generator=generator), weight, bias, "silu")


def part_of(call: ScanCall, start: int, end: int) -> ScanCall:
    """Return the tokens from ``start`` to ``end`` of a call."""
    tensors = (call.query, call.key, call.value, call.decay, call.beta)
    return ScanCall(call.mixer, *(None if each is None else each[start:end] for each in tensors))  # type: ignore[arg-type]


class Sequences:
    """Memory of requests in which everything that nobody wrote is NaN, and the slots as a scheduler gives them."""

    def __init__(self, form: Form, num_requests: int, rows: int, spec: StateSpec = SPEC) -> None:
        self._form = form
        pool = StatePoolConfig(
            num_slots=2 * num_requests + 1, num_requests=num_requests, rows_per_request=rows, interval=SPAN
        )
        self.layer = StateMemory({"": spec}, torch.float32, DEVICE).allocate(pool)[""]
        for tensor in self.layer.tensors():
            unwritten = tensor[1:] if tensor is self.layer.tails or tensor is self.layer.closed else tensor
            unwritten.fill_(torch.nan)

    def step(self, tokens: Sequence[tuple[int, int, int]]) -> Any:
        """Return the context of a step with ``tokens``: request, first position and count."""
        return self._form(self.layer, self.metadata(tokens))

    def metadata(self, tokens: Sequence[tuple[int, int, int]]) -> StateMetadata:
        """Return the states of a step with ``tokens``, as ``step`` takes them."""
        sequences, first = [], 0
        for request, start, count in tokens:
            base, last = span_start(start), span_start(start + count)
            writes = [(last, self.slot(request, last))] if last > base else []
            state = StateStep(request, self.slot(request, base) if base else 0, writes)
            sequences.append(SequenceStep(first, start, count, state))
            first += count
        return StateMetadata(sequences)

    def slot(self, request: int, position: int) -> int:
        return 2 * request + 1 + position // SPAN % 2


@pytest.mark.parametrize("corrects", [True, False], ids=["delta rule", "state space duality"])
def test_every_length_after_every_start_equals_the_recurrence(form: Form, *, corrects: bool) -> None:
    longest = 200
    for start in range(32):
        call = scan_call(start + longest, corrects=corrects, seed=start)
        state = torch.zeros(HEADS, KEY_SIZE, VALUE_SIZE)
        expected, _ = recurrent(call, state)
        for length in (*range(1, 40), 63, 64, 65, 127, 128, 129, 199, longest):
            sequences = Sequences(form, 1, SPAN)
            if start:
                sequences.step([(0, 0, start)]).scan(part_of(call, 0, start))
            output = sequences.step([(0, start, length)]).scan(part_of(call, start, start + length))
            torch.testing.assert_close(output, expected[start : start + length], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("corrects", [True, False], ids=["delta rule", "state space duality"])
def test_ragged_steps_of_any_size_equal_the_recurrence(form: Form, seed: int, *, corrects: bool) -> None:
    rng = random.Random(seed)
    lengths = [90, 37, 5]
    scans = [scan_call(n, corrects=corrects, seed=10 * seed + i) for i, n in enumerate(lengths)]
    convs = [conv_call(n, seed=0) for n in lengths]
    state = torch.zeros(HEADS, KEY_SIZE, VALUE_SIZE)
    expected = [recurrent(call, state)[0] for call in scans]
    alone = [
        ReferenceStates(StateMetadata.alone(*_whole(n))).convolve(call) for n, call in zip(lengths, convs, strict=True)
    ]
    sequences, done = Sequences(form, len(lengths), SPAN), [0] * len(lengths)
    while any(n < length for n, length in zip(done, lengths, strict=True)):
        wanted = [
            (i, done[i], min(rng.choice([0, 1, 7, 16, 17, 40]), lengths[i] - done[i])) for i in range(len(lengths))
        ]
        tokens = [each for each in wanted if each[2]]
        if not tokens:
            continue
        step = sequences.step(tokens)
        parts = [part_of(scans[i], start, start + count) for i, start, count in tokens]
        inputs = torch.cat([convs[i].inputs[start : start + count] for i, start, count in tokens])
        convolved = step.convolve(ConvCall(MIXER, inputs, convs[0].weight, convs[0].bias, "silu"))
        output = step.scan(_joined(parts))
        first = 0
        for i, start, count in tokens:
            rows = slice(first, first + count)
            torch.testing.assert_close(output[rows], expected[i][start : start + count], rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(convolved[rows], alone[i][start : start + count], rtol=1e-5, atol=1e-5)
            done[i] += count
            first += count


@pytest.mark.parametrize("seed", range(20))
def test_rejected_drafts_leave_no_trace(form: Form, seed: int) -> None:
    rng = random.Random(seed)
    call = scan_call(150, corrects=bool(seed % 2), seed=seed)
    wrong = scan_call(150, corrects=bool(seed % 2), seed=seed + 1000)
    convs, wrong_convs = conv_call(150, seed=0), conv_call(150, seed=1)
    expected, _ = recurrent(call, torch.zeros(HEADS, KEY_SIZE, VALUE_SIZE))
    alone = ReferenceStates(StateMetadata.alone(*_whole(150))).convolve(convs)
    sequences, done = Sequences(form, 1, 2 * SPAN), rng.randrange(1, 40)
    first = sequences.step([(0, 0, done)])
    first.convolve(ConvCall(MIXER, convs.inputs[:done], convs.weight, convs.bias, "silu"))
    first.scan(part_of(call, 0, done))
    while done < 130:
        drafts = rng.choice([0, 1, 3, 15])
        good = rng.randint(0, drafts)
        ends = (done, done + 1 + good, done + 1 + drafts)
        step = sequences.step([(0, done, 1 + drafts)])
        inputs = torch.cat([convs.inputs[ends[0] : ends[1]], wrong_convs.inputs[ends[1] : ends[2]]])
        convolved = step.convolve(ConvCall(MIXER, inputs, convs.weight, convs.bias, "silu"))
        output = step.scan(_joined([part_of(call, ends[0], ends[1]), part_of(wrong, ends[1], ends[2])]))
        kept = slice(0, 1 + good)
        torch.testing.assert_close(output[kept], expected[ends[0] : ends[1]], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(convolved[kept], alone[ends[0] : ends[1]], rtol=1e-5, atol=1e-5)
        done += 1 + good


def test_requests_whose_new_state_is_not_finite_are_reported(form: Form) -> None:
    sequences = Sequences(form, 2, SPAN)
    step = sequences.step([(0, 0, 20), (1, 0, 20)])
    call = scan_call(40, corrects=True)
    call.value[25] = torch.nan
    step.scan(call)
    assert step.step.broken == {1}


def test_requests_whose_new_inputs_of_a_short_convolution_are_not_finite_are_reported(form: Form) -> None:
    spec = StateSpec(channels=CHANNELS, kernel=KERNEL, input_size=4)
    pool = StatePoolConfig(num_slots=7, num_requests=3, rows_per_request=SPAN, interval=SPAN)
    layer = StateMemory({"": spec}, torch.float32, DEVICE).allocate(pool)[""]
    states = [StateStep(0, 0, [(16, 1)]), StateStep(1, 0, [(16, 3)]), StateStep(2, 0)]
    sequences = [SequenceStep(20 * i, 0, count, states[i]) for i, count in enumerate((20, 20, 5))]
    step = form(layer, StateMetadata(sequences))
    call = conv_call(45)
    call.inputs[35] = torch.inf  # the last input before the second request's state
    call.inputs[42] = torch.nan  # belongs to no state yet
    step.convolve(call)
    assert step.step.broken == {1}


@pytest.mark.parametrize("isa", runnable())
@pytest.mark.parametrize("corrects", [True, False], ids=["delta rule", "state space duality"])
@pytest.mark.parametrize("sizes", [(4, 2, 32, 64), (6, 1, 24, 80), (4, 4, 128, 128)])
def test_kernels_give_the_same_bits_for_any_parts_and_threads(
    sizes: tuple[int, int, int, int], isa: str, *, corrects: bool
) -> None:
    heads, key_heads, key_size, value_size = sizes
    spec = StateSpec(
        channels=600,
        kernel=KERNEL,
        input_size=4,
        num_heads=heads,
        num_key_heads=key_heads,
        key_size=key_size,
        value_size=value_size,
    )
    length, generator = 75, torch.Generator().manual_seed(sum(sizes))

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    keys = torch.nn.functional.normalize(normal(length, key_heads, key_size), dim=-1)
    beta = torch.rand(length, heads, generator=generator) if corrects else None
    decay = -torch.rand(length, heads, generator=generator)
    scan = ScanCall(MIXER, normal(length, key_heads, key_size), keys, normal(length, heads, value_size), decay, beta)
    conv = ConvCall(MIXER, normal(length, 600), normal(600, KERNEL), None, "silu")
    results = []
    for threads, size in ((1, length), (3, length), (2, 1), (2, 7), (2, 16), (2, 17)):
        sequences, outputs = Sequences(kernel_form(isa, threads), 1, SPAN, spec), []
        for start in range(0, length, size):
            part = slice(start, min(start + size, length))
            step = sequences.step([(0, start, part.stop - start)])
            convolved = step.convolve(ConvCall(MIXER, conv.inputs[part], conv.weight, None, "silu"))
            outputs.append((convolved, step.scan(part_of(scan, part.start, part.stop))))
        results.append([torch.cat(each) for each in zip(*outputs, strict=True)])
    torch.testing.assert_close(
        results[0][1], recurrent(scan, torch.zeros(heads, key_size, value_size))[0], rtol=1e-5, atol=2e-5
    )
    for convolved, output in results[1:]:
        assert torch.equal(convolved, results[0][0])
        assert torch.equal(output, results[0][1])


def _whole(length: int) -> tuple[IntArray, IntArray]:
    return np.array([0, length]), np.array([length])


def _joined(parts: Sequence[ScanCall]) -> ScanCall:
    """Return the tokens of several calls as one call."""

    def joined(name: str) -> torch.Tensor | None:
        tensors = [getattr(part, name) for part in parts]
        return None if tensors[0] is None else torch.cat(tensors)

    return ScanCall(MIXER, *(joined(name) for name in ("query", "key", "value", "decay", "beta")))  # type: ignore[arg-type]


def test_devices_report_states_that_are_not_finite_late() -> None:
    sequences = Sequences(torch_form, 2, SPAN)
    step = sequences.metadata([(0, 0, 20), (1, 0, 20)])
    call = scan_call(40, corrects=True)
    call.value[25] = torch.nan
    RowStates({MIXER: sequences.layer}, step, DEVICE, late=True).scan(call)
    assert step.broken == set()
    assert [flags.tolist() for flags in step.flags] == [[0, 1]]
