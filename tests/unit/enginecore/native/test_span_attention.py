"""Queries that see later keys, in the native kernels: compared with a dense mask, and bit by bit between batches."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from penstock_enginecore.attention.base import AttentionMetadata, AttentionParams, StepPlan
from penstock_enginecore.native.library import NativeLibrary, open_library
from tests.fakes.engines.instruction_sets import runnable
from tests.fakes.engines.rounding import ROUNDING, open_rounding
from tests.unit.enginecore.attention.test_backends import CPU, PARAMS, make_step, random_lengths
from tests.unit.enginecore.attention.test_key_ends import dense, spanned, with_ends
from tests.unit.enginecore.native.test_kernels import attend, keep, native
from tests.unit.enginecore.native.test_rounded_attention import rounded


@pytest.fixture(scope="module", params=runnable())
def library(request: pytest.FixtureRequest) -> NativeLibrary:
    return open_library(request.param, 2)


@pytest.mark.each_value
@pytest.mark.parametrize("block_size", [16, 48])
@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS)
def test_spans_in_mixed_steps_see_what_a_dense_mask_shows(
    library: NativeLibrary, params: AttentionParams, block_size: int
) -> None:
    for seed in range(6):
        lengths = random_lengths(seed)
        step = spanned(make_step(*lengths, block_size=block_size, seed=seed), seed)
        torch.testing.assert_close(attend(library, step, params), dense(step, params), rtol=2e-5, atol=4e-6)


@pytest.mark.parametrize(
    ("heads", "head_size"), [((1, 1), 16), ((6, 2), 64), ((71, 1), 32), ((32, 2), 128), ((8, 4), 256)]
)
def test_spans_of_heads_that_share_keys(library: NativeLibrary, heads: tuple[int, int], head_size: int) -> None:
    step = make_step(
        [1, 170, 5], [200, 270, 90], block_size=16, heads=heads, head_size=head_size, head_size_v=head_size
    )
    params = AttentionParams(scaling=head_size**-0.5)
    step = spanned(step, 2, longest=150)
    torch.testing.assert_close(attend(library, step, params), dense(step, params), rtol=3e-5, atol=4e-6)


LAYERS = {
    "full": PARAMS["full"],
    "softcap": PARAMS["softcap"],
    "window of a segment": AttentionParams(scaling=0.25, sliding_window=1024),
    "short window": AttentionParams(scaling=0.25, sliding_window=40),
    "window and sinks": AttentionParams(scaling=0.25, sliding_window=1100, sinks=torch.tensor([3.0, -1.0, 2.0, 0.0])),
}


@pytest.mark.parametrize("params", LAYERS.values(), ids=LAYERS)
@pytest.mark.parametrize("isa", runnable())
def test_spans_across_segments_of_keys_have_the_same_bits_on_any_number_of_threads(
    isa: str, params: AttentionParams
) -> None:
    for query_lens, seq_lens in (([80], [1060]), ([60, 3], [2090, 40]), ([256], [1100])):
        step = make_step(query_lens, seq_lens, block_size=16, heads=(4, 1), head_size=32, head_size_v=32)
        ends = step.metadata.positions() + 1
        first = query_lens[0]
        ends[3 : first - 2] = ends[first - 3]
        step = with_ends(step, ends)
        alone = attend(open_library(isa, 1), step, params)
        torch.testing.assert_close(alone, dense(step, params), rtol=3e-5, atol=4e-6)
        assert torch.equal(attend(open_library(isa, 8), step, params), alone)


@pytest.mark.parametrize("name", ["full", "window", "softcap and window", "sinks and window"])
def test_a_prompt_in_pieces_has_the_bits_that_it_has_at_once(library: NativeLibrary, name: str) -> None:
    ends = np.arange(300) + 1
    ends[5:70] = 70
    ends[130:299] = 299
    whole = with_ends(make_step([300], [300], block_size=16, heads=(4, 2), head_size=32, head_size_v=32), ends)
    params = PARAMS[name]
    expected = attend(library, whole, params)
    backend = native(library)
    cache, of = keep(whole, backend), whole.metadata
    for start, end in ((0, 5), (5, 70), (70, 130), (5, 299), (70, 300), (130, 299), (130, 300), (299, 300)):
        part = slice(start, end)
        metadata = AttentionMetadata(
            np.array([0, end - start]), np.array([end]), of.block_table, of.slot_mapping[part], 16, ends[part]
        )
        plan = StepPlan(metadata, CPU)
        got = backend.attend(whole.query[part], whole.key[part], whole.value[part], cache, plan, params)
        assert torch.equal(got, expected[part])


def test_queries_without_spans_keep_their_bits_beside_those_that_have_some(library: NativeLibrary) -> None:
    step = make_step([90, 70, 1], [90, 300, 99], block_size=16)
    ends = step.metadata.positions() + 1
    ends[30:85] = 85
    for params in PARAMS.values():
        plain, beside = attend(library, step, params), attend(library, with_ends(step, ends), params)
        assert torch.equal(beside[:30], plain[:30])
        assert torch.equal(beside[84:], plain[84:])
        if params.sliding_window != 1 and params.attention_chunk is None:
            assert not torch.equal(beside[30:84], plain[30:84])


def test_keys_behind_the_end_take_no_part(library: NativeLibrary) -> None:
    ends = np.arange(40) + 1
    ends[4:19] = 19
    step = with_ends(make_step([40], [40], block_size=16), ends)
    expected = attend(library, step, PARAMS["full"])
    behind = torch.from_numpy(step.metadata.slots(0, 19, 40))
    step.cache.keys[behind] = step.cache.values[behind] = torch.nan
    got = attend(library, step, PARAMS["full"])
    assert torch.equal(got[:19], expected[:19])
    assert got[19:].isnan().all()


def test_ends_that_the_kernels_would_read_otherwise_are_refused(library: NativeLibrary) -> None:
    step = spanned(make_step([9], [9], block_size=16), 0)
    ends = step.metadata.key_ends
    assert ends is not None
    with pytest.raises(ValueError, match="int32"):
        attend(library, with_ends(step, ends.astype(np.int32)), PARAMS["full"])


@pytest.mark.parametrize("rounding", ROUNDING, ids=" ".join)
@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS)
def test_spans_of_a_rounded_cache_are_those_within_the_rounding_of_weights(
    rounding: tuple[str, str], params: AttentionParams
) -> None:
    library = open_rounding(*rounding)
    for seed in range(3):
        known = rounded(spanned(make_step(*random_lengths(seed), block_size=16, seed=seed), seed))
        sizes = replace(known, value=known.value.abs(), cache=replace(known.cache, values=known.cache.values.abs()))
        error = (attend(library, known, params) - dense(known, params)).abs()
        bound = dense(sizes, params) * 2.0**-8 * 1.001 + 1e-5
        assert (error <= bound).all(), float((error / bound).max())
