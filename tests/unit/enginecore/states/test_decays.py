"""Recurrences with a decay for each row of a state, or with constant rates, in torch and in kernels, equal the recurrence."""

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from penstock_enginecore.states.base import ScanCall
from penstock_enginecore.states.core.spec import SPAN, StatePoolConfig, StateSpec
from penstock_enginecore.states.memory import StateMemory, num_bytes
from penstock_enginecore.states.reference import recurrent
from tests.fakes.engines.instruction_sets import runnable
from tests.unit.enginecore.states.test_rows import (
    CHANNELS,
    DEVICE,
    HEADS,
    KERNEL,
    KEY_HEADS,
    KEY_SIZE,
    MIXER,
    VALUE_SIZE,
    Form,
    Sequences,
    form,
    kernel_form,
)

__all__ = ["form"]

KINDS = ("delta rule", "state space duality", "selective scan")
"""Recurrences: the first two with a decay for each row of a state, the last with constant rates."""


def spec_of(kind: str) -> StateSpec:
    call = scan_call(1, kind=kind)
    return StateSpec(
        channels=CHANNELS,
        kernel=KERNEL,
        input_size=4,
        num_heads=call.value.shape[1],
        num_key_heads=call.key.shape[1],
        key_size=KEY_SIZE,
        value_size=call.value.shape[2],
        decay=call.kind,
    )


def scan_call(tokens: int, *, kind: str, seed: int = 0) -> ScanCall:
    """Return random inputs of a scan. Keys have unit length, as in the delta rule."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(tokens, *shape, generator=generator)

    def decays(*shape: int) -> torch.Tensor:
        return -torch.rand(tokens, *shape, generator=generator)

    if kind == "selective scan":
        rates = 3 * torch.rand(HEADS, KEY_SIZE, generator=torch.Generator().manual_seed(0))  # weights of the layer
        decay = 0.3 * decays(HEADS)
        return ScanCall(MIXER, normal(1, KEY_SIZE), normal(1, KEY_SIZE), normal(HEADS, 1), decay, None, rates)
    key = torch.nn.functional.normalize(normal(KEY_HEADS, KEY_SIZE), dim=-1)
    beta = torch.rand(tokens, HEADS, generator=generator) if kind == "delta rule" else None
    value = normal(HEADS, VALUE_SIZE)
    return ScanCall(MIXER, normal(KEY_HEADS, KEY_SIZE), key, value, decays(HEADS, KEY_SIZE), beta)


def no_state(call: ScanCall) -> torch.Tensor:
    """Return the state before the first token of ``call``."""
    return torch.zeros(HEADS, KEY_SIZE, call.value.shape[2])


def part_of(call: ScanCall, start: int, end: int) -> ScanCall:
    """Return the tokens from ``start`` to ``end`` of a call."""
    tensors = (call.query, call.key, call.value, call.decay, call.beta)
    parts: Any = [None if each is None else each[start:end] for each in tensors]
    return ScanCall(call.mixer, *parts, call.rates)


def joined(parts: Sequence[ScanCall]) -> ScanCall:
    """Return the tokens of several calls as one call."""

    def of(name: str) -> torch.Tensor | None:
        tensors = [getattr(part, name) for part in parts]
        return None if tensors[0] is None else torch.cat(tensors)

    tensors: Any = [of(name) for name in ("query", "key", "value", "decay", "beta")]
    return ScanCall(MIXER, *tensors, parts[0].rates)


@pytest.mark.parametrize("kind", KINDS)
def test_every_length_after_every_start_equals_the_recurrence(form: Form, kind: str) -> None:
    longest = 200
    for start in range(32):
        call = scan_call(start + longest, kind=kind, seed=start)
        expected, _ = recurrent(call, no_state(call))
        for length in (*range(1, 40), 63, 64, 65, 127, 128, 129, 199, longest):
            sequences = Sequences(form, 1, SPAN, spec_of(kind))
            if start:
                sequences.step([(0, 0, start)]).scan(part_of(call, 0, start))
            output = sequences.step([(0, start, length)]).scan(part_of(call, start, start + length))
            torch.testing.assert_close(output, expected[start : start + length], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("kind", KINDS)
def test_ragged_steps_of_any_size_equal_the_recurrence(form: Form, kind: str, seed: int) -> None:
    rng = random.Random(seed)
    lengths = [90, 37, 5]
    scans = [scan_call(n, kind=kind, seed=10 * seed + i) for i, n in enumerate(lengths)]
    expected = [recurrent(call, no_state(call))[0] for call in scans]
    sequences, done = Sequences(form, len(lengths), SPAN, spec_of(kind)), [0] * len(lengths)
    while any(n < length for n, length in zip(done, lengths, strict=True)):
        wanted = [
            (i, done[i], min(rng.choice([0, 1, 7, 16, 17, 40]), lengths[i] - done[i])) for i in range(len(lengths))
        ]
        tokens = [each for each in wanted if each[2]]
        if not tokens:
            continue
        parts = [part_of(scans[i], start, start + count) for i, start, count in tokens]
        output = sequences.step(tokens).scan(joined(parts))
        first = 0
        for i, start, count in tokens:
            rows = slice(first, first + count)
            torch.testing.assert_close(output[rows], expected[i][start : start + count], rtol=1e-5, atol=1e-5)
            done[i] += count
            first += count


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("kind", KINDS)
def test_rejected_drafts_leave_no_trace(form: Form, kind: str, seed: int) -> None:
    rng = random.Random(seed)
    call = scan_call(150, kind=kind, seed=seed)
    wrong = scan_call(150, kind=kind, seed=seed + 1000)
    expected, _ = recurrent(call, no_state(call))
    sequences, done = Sequences(form, 1, 2 * SPAN, spec_of(kind)), rng.randrange(1, 40)
    sequences.step([(0, 0, done)]).scan(part_of(call, 0, done))
    while done < 130:
        drafts = rng.choice([0, 1, 3, 15])
        good = rng.randint(0, drafts)
        ends = (done, done + 1 + good, done + 1 + drafts)
        step = sequences.step([(0, done, 1 + drafts)])
        output = step.scan(joined([part_of(call, ends[0], ends[1]), part_of(wrong, ends[1], ends[2])]))
        kept = slice(0, 1 + good)
        torch.testing.assert_close(output[kept], expected[ends[0] : ends[1]], rtol=1e-5, atol=1e-5)
        done += 1 + good


@pytest.mark.parametrize("isa", runnable())
def test_a_decay_for_each_row_has_the_same_bits_in_any_parts_of_kernels(isa: str) -> None:
    call = scan_call(75, kind="delta rule")
    whole = Sequences(kernel_form(isa, 1), 1, SPAN, spec_of("delta rule")).step([(0, 0, 75)]).scan(call)
    for size in (1, 7, 16, 17):
        parts = Sequences(kernel_form(isa, 3), 1, SPAN, spec_of("delta rule"))
        for start in range(0, 75, size):
            end = min(start + size, 75)
            output = parts.step([(0, start, end - start)]).scan(part_of(call, start, end))
            assert torch.equal(output, whole[start:end])


@pytest.mark.parametrize("seed", range(5))
def test_a_selective_scan_has_the_same_bits_in_any_parts(form: Form, seed: int) -> None:
    rng = random.Random(seed)
    call = scan_call(100, kind="selective scan", seed=seed)
    whole = Sequences(form, 1, 2 * SPAN, spec_of("selective scan"))
    expected = whole.step([(0, 0, 100)]).scan(call)
    parts, done = Sequences(form, 1, 2 * SPAN, spec_of("selective scan")), 0
    while done < 100:
        count = min(rng.choice([1, 1, 2, 7, 16, 17]), 100 - done)
        output = parts.step([(0, done, count)]).scan(part_of(call, done, done + count))
        assert torch.equal(output, expected[done : done + count])
        done += count


@pytest.mark.parametrize("kind", KINDS)
def test_states_and_rows_have_the_bytes_of_the_spec(kind: str) -> None:
    spec = spec_of(kind)
    layers = StateMemory({"": spec}, torch.float32, DEVICE)
    pool = StatePoolConfig(num_slots=5, num_requests=2, rows_per_request=2 * SPAN, interval=SPAN)
    assert num_bytes(layers.allocate(pool)) == 5 * spec.slot_bytes + 2 * 2 * SPAN * spec.row_bytes


@pytest.mark.parametrize("kind", KINDS)
def test_requests_whose_new_state_is_not_finite_are_reported(form: Form, kind: str) -> None:
    sequences = Sequences(form, 2, SPAN, spec_of(kind))
    step: Any = sequences.step([(0, 0, 20), (1, 0, 20)])
    call = scan_call(40, kind=kind)
    call.value[25] = torch.nan
    step.scan(call)
    assert step.step.broken == {1}
