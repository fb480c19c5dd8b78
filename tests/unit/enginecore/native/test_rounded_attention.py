"""Attention of kernels that may round: queries, keys, values and weights are bfloat16 where they are multiplied."""

from dataclasses import replace

import pytest
import torch

from penstock_enginecore.attention.base import AttentionParams, StepPlan
from penstock_enginecore.attention.kv_cache import SLOTS
from penstock_enginecore.native.attention import TILES
from penstock_enginecore.native.library import NativeLibrary, open_library
from tests.emulation.build import pretend
from tests.fakes.engines.rounding import ROUNDING, open_rounding
from tests.unit.enginecore.attention.test_backends import CPU, PARAMS, Step, make_step, random_lengths
from tests.unit.enginecore.native.test_kernels import attend, attend_part, keep, native


@pytest.fixture(scope="module", params=ROUNDING, ids=" ".join)
def rounding(request: pytest.FixtureRequest) -> NativeLibrary:
    return open_rounding(*request.param)


def rounded(step: Step) -> Step:
    """Return the step with queries, keys and values rounded to bfloat16."""
    half = [each.bfloat16().float() for each in (step.query, step.key, step.value, step.cache.keys, step.cache.values)]
    return Step(half[0], half[1], half[2], replace(step.cache, keys=half[3], values=half[4]), step.metadata)


def check(library: NativeLibrary, step: Step, params: AttentionParams) -> None:
    """Check the error: queries, keys and values are rounded already, so only weights are rounded, each by at most 2^-8."""
    known = rounded(step)
    sizes = replace(known, value=known.value.abs(), cache=replace(known.cache, values=known.cache.values.abs()))
    error = (attend(library, step, params) - known.run("reference", params)).abs()
    bound = sizes.run("reference", params) * 2.0**-8 * 1.001 + 1e-5
    assert (error <= bound).all(), float((error / bound).max())


@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS)
def test_attention_is_that_of_rounded_numbers_within_the_rounding_of_weights(
    rounding: NativeLibrary, params: AttentionParams
) -> None:
    for seed in range(4):
        check(rounding, make_step(*random_lengths(seed), block_size=16, seed=seed), params)


@pytest.mark.parametrize(
    ("heads", "head_size", "head_size_v"),
    [((1, 1), 16, 16), ((6, 2), 64, 64), ((71, 1), 32, 32), ((8, 2), 128, 128), ((4, 4), 24, 16), ((2, 1), 26, 48)],
)
def test_any_number_of_heads_and_sizes_of_keys(
    rounding: NativeLibrary, heads: tuple[int, int], head_size: int, head_size_v: int
) -> None:
    lengths = [1, 70, 5], [200, 70, 90]
    step = make_step(*lengths, block_size=16, heads=heads, head_size=head_size, head_size_v=head_size_v)
    check(rounding, step, AttentionParams(scaling=head_size**-0.5))


@pytest.mark.parametrize("window", [None, 33])
def test_a_querys_bits_are_its_own_whatever_is_computed_beside_it(rounding: NativeLibrary, window: int | None) -> None:
    params = AttentionParams(scaling=0.25, sliding_window=window)
    whole = make_step([150, 40], [150, 170], block_size=16, heads=(6, 2), head_size=32, head_size_v=32)
    expected = attend(rounding, whole, params)
    backend = native(rounding)
    cache = keep(whole, backend)
    for start, end in ((0, 1), (1, 2), (32, 34), (63, 70), (127, 129), (65, 150), (149, 150)):
        part = slice(start, end)
        assert torch.equal(attend_part(backend, whole, cache, part, params), expected[part])


def test_nan_reaches_the_rows_that_see_it(rounding: NativeLibrary) -> None:
    step = make_step([1, 1, 1], [20, 20, 20], block_size=16)
    step.query[0] = torch.nan
    slots = step.metadata.slots(1, 7, 8)
    step.cache.values[torch.from_numpy(slots)] = torch.inf
    output = attend(rounding, step, AttentionParams(scaling=0.25))
    assert output[0].isnan().all()
    assert output[1].isinf().all()
    assert output[2].isfinite().all()


@pytest.mark.parametrize(("dtype", "head_size"), [(torch.float32, 16), (torch.bfloat16, 15)], ids=str)
def test_a_cache_of_floats_is_attended_in_floats_and_odd_heads_by_torch(
    rounding: NativeLibrary, dtype: torch.dtype, head_size: int
) -> None:
    step, params = make_step([1, 9], [30, 9], block_size=16, head_size=head_size), AttentionParams(scaling=0.25)
    backend = native(rounding)
    layout = step.layout(backend, dtype)
    assert layout is (TILES if dtype == torch.float32 else SLOTS)
    keys, values = (torch.zeros_like(each, dtype=dtype) for each in (step.cache.keys, step.cache.values))
    cache = replace(step.cache, keys=keys, values=values, layout=layout)
    for i, length in enumerate(step.metadata.seq_lens):
        slots = step.metadata.slots(i, 0, int(length))
        plan = StepPlan(replace(step.metadata, slot_mapping=slots), CPU)
        backend.write(cache, plan, *(each.to(dtype) for each in step.cache.gather(torch.from_numpy(slots))))
    query, key, value = (each.to(dtype) for each in (step.query, step.key, step.value))
    got = backend.attend(query, key, value, cache, StepPlan(step.metadata, CPU), params)
    assert got.dtype == dtype
    tolerance = 2e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(got.float(), step.run("reference", params), rtol=tolerance, atol=tolerance)


def test_queries_of_a_model_in_bfloat16_are_taken_too(rounding: NativeLibrary) -> None:
    step, params = rounded(make_step([1, 40], [70, 90], block_size=16)), AttentionParams(scaling=0.25)
    backend = native(rounding)
    cache, plan = keep(step, backend), StepPlan(step.metadata, CPU)
    got = backend.attend(step.query.bfloat16(), step.key.bfloat16(), step.value.bfloat16(), cache, plan, params)
    assert torch.equal(got, attend(rounding, step, params).bfloat16())


def test_without_leave_to_round_there_are_no_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, "avx512_bf16")
    step, params = make_step(*random_lengths(1), block_size=16), AttentionParams(scaling=0.25)
    library = open_library("avx512_bf16", 1)
    assert step.layout(native(library), torch.bfloat16) is SLOTS
    torch.testing.assert_close(attend(library, step, params), step.run("reference", params), rtol=2e-5, atol=4e-6)
