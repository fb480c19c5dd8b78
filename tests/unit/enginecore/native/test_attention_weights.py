"""Attention weights: their precision, and maxima that rise from tile to tile change no result."""

import numpy as np
import pytest
import torch

from penstock_enginecore.attention.base import AttentionParams
from penstock_enginecore.native.library import NativeLibrary, open_library
from tests.fakes.engines.instruction_sets import runnable
from tests.fakes.engines.rounding import ROUNDING, open_rounding
from tests.unit.enginecore.attention.test_backends import Step, make_step
from tests.unit.enginecore.native.test_kernels import attend, attend_part, keep, native
from tests.unit.enginecore.native.test_rounded_attention import rounded

SINKS = torch.tensor([0.5, -1.0, 2.0, 0.0, 9.0, -9.0])
LAYERS = {
    "full": AttentionParams(scaling=0.25),
    "window": AttentionParams(scaling=0.25, sliding_window=200),
    "chunk, softcap and sinks": AttentionParams(scaling=0.25, softcap=30.0, sinks=SINKS, attention_chunk=150),
}
"""Attention parameters by name."""


@pytest.fixture(scope="module", params=[*((isa, "") for isa in runnable()), *ROUNDING], ids=" ".join)
def library(request: pytest.FixtureRequest) -> NativeLibrary:
    isa, kind = request.param
    return open_rounding(isa, kind) if kind else open_library(isa, 2)


def rising(query_lens: list[int], seq_lens: list[int], by: float) -> Step:
    """Return a step whose keys grow with their position, so that the maximum score rises again and again."""
    step = rounded(make_step(query_lens, seq_lens, block_size=16, heads=(6, 2), head_size=32, head_size_v=32))
    for i, length in enumerate(seq_lens):
        slots = torch.from_numpy(step.metadata.slots(i, 0, length))
        step.cache.keys[slots] = (step.cache.keys[slots] * torch.linspace(0, by, length)[:, None]).bfloat16().float()
    return step


@pytest.mark.parametrize("by", [1.0, 10.0, 100.0])
def test_scores_may_rise_as_far_as_they_like(library: NativeLibrary, by: float) -> None:
    step, params = rising([1, 40, 300], [700, 290, 300], by), AttentionParams(scaling=0.25)
    tolerance = 0.02 if library.rounds_to else 3e-5 * max(by, 1.0)
    torch.testing.assert_close(
        attend(library, step, params), step.run("reference", params), rtol=tolerance, atol=tolerance
    )


@pytest.mark.parametrize("params", LAYERS.values(), ids=LAYERS)
def test_a_rows_bits_are_its_own_where_peaks_rise(library: NativeLibrary, params: AttentionParams) -> None:
    whole = rising([420], [420], 40.0)
    expected = attend(library, whole, params)
    backend = native(library)
    cache = keep(whole, backend)
    for start, end in ((0, 1), (63, 65), (100, 260), (127, 129), (128, 129), (255, 420), (419, 420)):
        part = slice(start, end)
        assert torch.equal(attend_part(backend, whole, cache, part, params), expected[part])


def test_a_weight_is_off_by_its_rounding_and_little_more(library: NativeLibrary) -> None:
    """Of two keys, the first weighs 1 and the second e^-x. Only the second has a value, so the result shows its weight."""
    x = torch.arange(0, 256) / 16
    step = make_step([1] * len(x), [2] * len(x), block_size=16, heads=(1, 1))
    step.query[:] = 0
    step.query[:, 0, 0] = x
    for i in range(len(x)):
        first, second = step.metadata.slots(i, 0, 2)
        step.cache.keys[[first, second]] = 0
        step.cache.keys[second, 0] = -1
        step.cache.values[first], step.cache.values[second] = 0, 1
    share = attend(library, step, AttentionParams(scaling=1.0))[:, 0, 0].double().numpy()
    exact = np.exp(-x.double().numpy())
    bound = 2.0**-8 + 2.0**-13 if library.rounds_to else 2.0**-20
    assert np.abs(share / (1 - share) / exact - 1).max() < bound


@pytest.mark.parametrize("scaling", [0.0, -0.25])
def test_scores_are_scaled_by_any_number(library: NativeLibrary, scaling: float) -> None:
    step, params = rising([1, 40], [300, 290], 10.0), AttentionParams(scaling=scaling)
    tolerance = 0.02 if library.rounds_to else 1e-4
    torch.testing.assert_close(
        attend(library, step, params), step.run("reference", params), rtol=tolerance, atol=tolerance
    )
