"""Attention of few queries over many keys: segments of keys are tasks of their own where there are more threads than
tasks.
"""

import pytest
import torch

from penstock_enginecore.attention.base import AttentionParams
from penstock_enginecore.native.library import NativeLibrary, open_library
from tests.fakes.engines.instruction_sets import runnable
from tests.fakes.engines.rounding import open_rounding
from tests.unit.enginecore.attention.test_backends import PARAMS, Step, make_step
from tests.unit.enginecore.native.test_kernels import attend, attend_part, keep, native

LENGTHS = {
    "one token": ([1], [3001]),
    "a whole segment": ([1, 1], [1024, 2048]),
    "one more": ([1, 1], [1025, 2049]),
    "a piece of a prompt across segments": ([40], [2070]),
    "a short one beside": ([1, 3], [2600, 20]),
}
OTHERS = {
    "window of a segment": AttentionParams(scaling=0.25, sliding_window=1024),
    "window across segments": AttentionParams(scaling=0.25, sliding_window=1500),
    "chunk across segments": AttentionParams(scaling=0.25, attention_chunk=1300),
    "window and sinks": AttentionParams(scaling=0.25, sliding_window=1100, sinks=torch.tensor([3.0, -1.0, 2.0, 0.0])),
}
LAYERS = {name: PARAMS[name] for name in ("full", "window", "sinks", "chunk, softcap and sinks")} | OTHERS
"""Attention parameters by name."""


def step_of(lengths: tuple[list[int], list[int]]) -> Step:
    return make_step(*lengths, block_size=16, heads=(4, 1), head_size=32, head_size_v=32)


def open_with(isa: str, threads: int) -> NativeLibrary:
    return open_rounding("avx512_bf16", "emulated", threads) if isa == "rounding" else open_library(isa, threads)


@pytest.fixture(scope="module", params=[*runnable(), "rounding"])
def alone_and_many(request: pytest.FixtureRequest) -> tuple[NativeLibrary, NativeLibrary]:
    """Return the same kernels with one thread, which computes a query's keys in one task, and with eight threads."""
    return open_with(request.param, 1), open_with(request.param, 8)


@pytest.mark.each_value
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("params", LAYERS.values(), ids=LAYERS)
def test_many_threads_give_the_bits_of_one(
    alone_and_many: tuple[NativeLibrary, NativeLibrary], params: AttentionParams, lengths: tuple[list[int], list[int]]
) -> None:
    alone, many = alone_and_many
    step = step_of(lengths)
    got = attend(many, step, params)
    assert torch.equal(got, attend(alone, step, params))
    rounds = alone.parts == 1
    expected = step.run("reference", params)
    torch.testing.assert_close(got, expected, rtol=0.02 if rounds else 3e-5, atol=0.02 if rounds else 4e-6)


@pytest.mark.each_value
@pytest.mark.parametrize(
    ("alone_and_many", "name"),
    [
        *((isa, name) for isa in runnable() for name in ("full", "window across segments", "window and sinks")),
        ("rounding", "window and sinks"),  # emulated instructions take seconds
    ],
    indirect=["alone_and_many"],
)
def test_a_querys_bits_do_not_tell_whether_its_prompt_was_computed_at_once(
    alone_and_many: tuple[NativeLibrary, NativeLibrary], name: str
) -> None:
    alone, params = alone_and_many[0], LAYERS[name]
    whole = step_of(([2100], [2100]))
    expected = attend(alone, whole, params)
    for library in alone_and_many:
        backend = native(library)
        cache = keep(whole, backend)
        for start, end in ((2099, 2100), (1023, 1024), (1024, 1025), (1010, 1040), (2040, 2060)):
            part = slice(start, end)
            assert torch.equal(attend_part(backend, whole, cache, part, params), expected[part])


def test_nan_stays_in_the_rows_that_see_it(alone_and_many: tuple[NativeLibrary, NativeLibrary]) -> None:
    _, many = alone_and_many
    step = step_of(([1, 1], [2500, 2500]))
    step.cache.values[torch.from_numpy(step.metadata.slots(0, 1500, 1501))] = torch.nan
    got = attend(many, step, AttentionParams(scaling=0.25))
    assert got[0].isnan().all()
    assert got[1].isfinite().all()
    seen = attend(many, step, AttentionParams(scaling=0.25, sliding_window=900))
    assert seen.isfinite().all()
