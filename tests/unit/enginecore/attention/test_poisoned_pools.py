"""Attention reads nothing that a query does not see: pools full of NaN and infinities give the same numbers, bit by
bit.
"""

from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock_enginecore.attention.base import AttentionBackend, AttentionParams, StepPlan
from penstock_enginecore.attention.factory import create_backend
from penstock_enginecore.attention.kv_cache import KVCache
from penstock_enginecore.native.attention import NativeAttention
from penstock_enginecore.native.library import open_library
from tests.fakes.engines.instruction_sets import runnable
from tests.fakes.engines.rounding import ROUNDING, open_rounding
from tests.unit.enginecore.attention.test_backends import CPU, PARAMS, Step, make_step

POISONS = {"nan": torch.nan, "inf": torch.inf, "-inf": -torch.inf, "largest": torch.finfo(torch.float32).max}
LENGTHS = {
    "decode": ([1, 1, 1, 1], [1, 37, 129, 16]),
    "prefill": ([20, 1, 70], [20, 1, 70]),
    "chunks and prefix hits": ([7, 33, 1], [100, 49, 66]),
    "mixed": ([1, 40, 1, 5, 90], [77, 40, 200, 131, 99]),
}
HEADS = {"all heads": (4, 4), "grouped": (4, 2), "one key head": (4, 1)}


@dataclass(frozen=True)
class Backend:
    """A backend by ``name``, or kernels by their instruction set. Kernels with ``rounding`` may round inputs."""

    name: str
    rounding: str = ""

    def make(self) -> AttentionBackend:
        if self.name in ("cpu", "reference"):
            return create_backend(self.name, CPU)
        library = open_rounding(self.name, self.rounding) if self.rounding else open_library(self.name, 2)
        return create_backend("auto", CPU, partial(NativeAttention, library))

    @property
    def block_sizes(self) -> tuple[int, ...]:
        return (1, 4, 16) if self.name in ("cpu", "reference") else (16, 48)

    def __str__(self) -> str:
        return f"{self.name} {self.rounding}".strip()


BACKENDS = [
    *(Backend(name) for name in ("reference", "cpu", *runnable())),
    *(
        Backend(isa, kind) for isa, kind in ROUNDING if (isa, kind) != ("amx", "emulated")
    ),  # the same text as its neighbour
]
every_backend = pytest.mark.parametrize("backend", BACKENDS, ids=str)


class Pool:
    """A step's tokens in a pool of a backend's own layout, whose other slots hold small numbers, the null block zeros."""

    def __init__(self, backend: AttentionBackend, step: Step) -> None:
        self.backend = backend
        self.step = step
        metadata = step.metadata
        dtype = (
            torch.bfloat16 if isinstance(backend, NativeAttention) and backend.library.parts == 1 else step.key.dtype
        )
        self.cache = replace(
            step.cache,
            keys=step.cache.keys.to(dtype, copy=True),
            values=step.cache.values.to(dtype, copy=True),
            layout=step.layout(backend, dtype),
        )
        self.num_slots = len(step.cache.keys)
        ends = metadata.seq_lens
        self.owned = [metadata.slots(i, 0, int(end)) for i, end in enumerate(ends)]
        others = np.setdiff1d(np.arange(self.num_slots), np.concatenate(self.owned))
        self.fill(others, 0.0)
        keys, values = step.cache.gather(torch.from_numpy(np.concatenate(self.owned)))
        self.write(np.concatenate(self.owned), keys, values)

    def write(self, slots: np.ndarray, keys: torch.Tensor, values: torch.Tensor) -> None:
        plan = StepPlan(replace(self.step.metadata, slot_mapping=np.ascontiguousarray(slots)), CPU)
        self.backend.write(self.cache, plan, keys, values)

    def fill(self, slots: np.ndarray, number: float) -> None:
        heads = self.cache.num_kv_heads
        keys, values = (
            torch.full((len(slots), heads, part.shape[1] // heads), number, dtype=self.step.key.dtype)
            for part in (self.cache.keys, self.cache.values)
        )
        self.write(slots, keys, values)

    def unseen(self, params: AttentionParams) -> np.ndarray:
        """Return the slots that no query of the step sees, including those of the null block."""
        metadata = self.step.metadata
        seen = []
        for i, count in enumerate(np.diff(metadata.query_start_loc)):
            position = int(metadata.seq_lens[i] - count)
            seen.append(self.owned[i][first_key(params, position) :])
        return np.setdiff1d(np.arange(self.num_slots), np.concatenate(seen))

    def attend(self, params: AttentionParams) -> torch.Tensor:
        step = self.step
        plan = StepPlan(step.metadata, CPU)
        return self.backend.attend(step.query, step.key, step.value, self.cache, plan, params)


def first_key(params: AttentionParams, position: int) -> int:
    """Return the first key that a query sees. This is independent of the tested code."""
    window = 0 if params.sliding_window is None else max(0, position - params.sliding_window + 1)
    chunk = 0 if params.attention_chunk is None else position - position % params.attention_chunk
    return max(window, chunk)


def check(backend: Backend, step: Step, params: AttentionParams, *numbers: float) -> None:
    pool = Pool(backend.make(), step)
    expected = pool.attend(params)
    assert expected.isfinite().all()
    unseen = pool.unseen(params)
    for number in numbers:
        pool.fill(unseen, number)
        assert torch.equal(pool.attend(params), expected)


@pytest.mark.each_value
@every_backend
@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS)
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_contents_of_invisible_slots_change_no_bit(
    backend: Backend, params: AttentionParams, lengths: tuple[list[int], list[int]]
) -> None:
    for block_size in backend.block_sizes:
        check(backend, make_step(*lengths, block_size=block_size), params, *POISONS.values())


@pytest.mark.each_value
@every_backend
@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize("head_sizes", [(16, 16), (64, 32), (24, 16)], ids=str)
def test_nor_does_it_with_any_number_of_heads_and_sizes_of_keys(
    backend: Backend, heads: tuple[int, int], head_sizes: tuple[int, int]
) -> None:
    for params in (PARAMS["window"], PARAMS["chunk, softcap and sinks"], PARAMS["full"]):
        step = make_step(
            *LENGTHS["mixed"], block_size=16, heads=heads, head_size=head_sizes[0], head_size_v=head_sizes[1]
        )
        check(backend, step, params, torch.nan)


@pytest.mark.parametrize("name", ["reference", "cpu"])
@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS)
def test_nor_does_it_in_bfloat16(name: str, params: AttentionParams) -> None:
    step = make_step(*LENGTHS["mixed"], block_size=4, dtype=torch.bfloat16)
    check(Backend(name), step, params, torch.nan)


@every_backend
def test_padding_of_block_tables_is_not_read(backend: Backend) -> None:
    """Block tables of a batch are padded to the longest. The padding may be anything, such as block ids of earlier
    requests.
    """
    for params in PARAMS.values():
        step = make_step(*LENGTHS["mixed"], block_size=16)
        pool = Pool(backend.make(), step)
        expected = pool.attend(params)
        spare = np.setdiff1d(np.arange(pool.num_slots // 16), step.metadata.block_table)
        pool.fill(pool.unseen(params), torch.nan)
        table = step.metadata.block_table
        for row, length in zip(table, step.metadata.seq_lens, strict=True):
            row[-(-length // 16) :] = spare[0]
        assert torch.equal(pool.attend(params), expected)


@settings(max_examples=60, deadline=None)
@given(
    backend=st.sampled_from(BACKENDS),
    requests=st.lists(st.tuples(st.integers(0, 150), st.integers(1, 70)), min_size=1, max_size=4),
    window=st.none() | st.integers(1, 100),
    chunk=st.none() | st.integers(1, 100),
    softcap=st.none() | st.just(3.0),
    sinks=st.booleans(),
    number=st.sampled_from(list(POISONS.values())),
)
def test_whatever_the_layer_asks_for(
    backend: Backend,
    requests: list[tuple[int, int]],
    window: int | None,
    chunk: int | None,
    softcap: float | None,
    sinks: bool,
    number: float,
) -> None:
    params = AttentionParams(
        scaling=0.25,
        sliding_window=window,
        softcap=softcap,
        sinks=torch.tensor([0.5, -1.0, 2.0, 0.0]) if sinks else None,
        attention_chunk=chunk,
    )
    step = make_step([new for _, new in requests], [cached + new for cached, new in requests], block_size=16)
    check(backend, step, params, number)


def spoil(step: Step, request: int, position: int, number: float) -> Step:
    """Return the step with ``number`` in the keys and values of a request's new tokens from ``position`` on."""
    start, end = step.metadata.query_start_loc[request : request + 2]
    length = int(step.metadata.seq_lens[request])
    first = int(end) - (length - position)
    assert first >= start
    key, value = step.key.clone(), step.value.clone()
    key[first:end] = value[first:end] = number
    slots = torch.from_numpy(step.metadata.slots(request, position, length))
    cache = KVCache(step.cache.keys.clone(), step.cache.values.clone(), step.cache.num_kv_heads)
    cache.keys[slots] = cache.values[slots] = number
    return replace(step, key=key, value=value, cache=cache)


@pytest.mark.each_value
@every_backend
@pytest.mark.parametrize(
    ("number", "position"), list(zip(POISONS.values(), (150, 171, 197, 144), strict=True)), ids=POISONS
)
@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS)
def test_a_tokens_vectors_reach_no_token_before_it(
    backend: Backend, number: float, position: int, params: AttentionParams
) -> None:
    """Otherwise the blocks of a prefix would depend on later tokens.

    torch's fast kernels compute finite values in another order than its careful ones, so the last bits of that backend
    may differ.
    """
    step = make_step([1, 60], [40, 200], block_size=16)
    spoiled = spoil(step, request=1, position=position, number=number)
    seen = torch.ones(len(step.query), dtype=torch.bool)
    seen[1 + position - 140 : 61] = False
    expected, got = (Pool(backend.make(), each).attend(params)[seen] for each in (step, spoiled))
    if backend.name == "cpu":
        torch.testing.assert_close(got, expected, rtol=2e-5, atol=2e-6)
    else:
        assert torch.equal(got, expected)


@pytest.mark.each_value
@every_backend
@pytest.mark.parametrize("number", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("what", ["key", "value"])
def test_nan_that_a_query_sees_reaches_its_output(backend: Backend, number: float, what: str) -> None:
    """Overflows are not hidden, so that they are counted and reported."""
    for params in PARAMS.values():
        step = make_step([1, 60], [40, 200], block_size=16)
        spoiled = spoil(step, request=1, position=170, number=number)
        kept = replace(step.cache, keys=step.cache.keys, values=spoiled.cache.values)
        if what == "key":
            kept = replace(step.cache, keys=spoiled.cache.keys, values=step.cache.values)
            spoiled = replace(spoiled, value=step.value, cache=kept)
        else:
            spoiled = replace(spoiled, key=step.key, cache=kept)
        output = Pool(backend.make(), spoiled).attend(params)
        assert not output[1 + 170 - 140 : 61].isfinite().any(dim=-1).any()
