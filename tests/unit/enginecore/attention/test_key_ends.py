"""Queries that see later keys, compared with attention with a dense mask in torch."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock_enginecore.attention import cpu as cpu_module
from penstock_enginecore.attention.base import AttentionMetadata, AttentionParams, IntArray
from tests.unit.enginecore.attention.test_backends import PARAMS, Step, make_step, random_lengths

BACKENDS = ["reference", "cpu"]


def spanned(step: Step, seed: int, longest: int = 30) -> Step:
    """Return the step with spans of up to ``longest`` new tokens that see each other."""
    generator = np.random.default_rng(seed)
    positions = step.metadata.positions()
    ends = positions + 1
    starts = step.metadata.query_start_loc
    for start, end in itertools.pairwise(starts):
        at = int(start + generator.integers(0, 4))
        while at < end:
            upto = min(end, at + int(generator.integers(1, longest + 1)))
            ends[at:upto] = positions[upto - 1] + 1
            at = upto + int(generator.integers(0, 6))
    return with_ends(step, ends)


def with_ends(step: Step, ends: IntArray) -> Step:
    return replace(step, metadata=replace(step.metadata, key_ends=ends))


def dense(step: Step, params: AttentionParams) -> torch.Tensor:
    """Compute attention in float64 with an explicit mask for each query."""
    metadata, outputs = step.metadata, []
    assert metadata.key_ends is not None
    for i, length in enumerate(map(int, metadata.seq_lens)):
        start, end = (int(x) for x in metadata.query_start_loc[i : i + 2])
        keys, values = step.cache.gather(torch.from_numpy(metadata.slots(i, 0, length)))
        groups = step.query.shape[1] // keys.shape[1]
        k, v = (x.double().repeat_interleave(groups, 1).transpose(0, 1) for x in (keys, values))
        scores = step.query[start:end].double().transpose(0, 1) @ k.transpose(1, 2) * params.scaling
        if params.softcap is not None:
            scores = torch.tanh(scores / params.softcap) * params.softcap
        mask = torch.zeros(end - start, length, dtype=torch.bool)
        for row in range(end - start):
            position = length - (end - start) + row
            low = 0 if params.sliding_window is None else max(0, position - params.sliding_window + 1)
            if params.attention_chunk is not None:
                low = max(low, position // params.attention_chunk * params.attention_chunk)
            mask[row, low : int(metadata.key_ends[start + row])] = True
        scores = scores.masked_fill(~mask, -torch.inf)
        if params.sinks is not None:
            sinks = params.sinks.double()[:, None, None].expand(-1, end - start, 1)
            scores = torch.cat([scores, sinks], dim=2)
        outputs.append((scores.softmax(2)[..., :length] @ v).transpose(0, 1))
    return torch.cat(outputs).float()


@pytest.mark.each_value
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS)
def test_spans_in_mixed_steps_see_what_a_dense_mask_shows(
    params: AttentionParams, block_size: int, backend: str
) -> None:
    for seed in range(4):
        step = spanned(make_step(*random_lengths(seed), block_size=block_size, seed=seed), seed)
        torch.testing.assert_close(step.run(backend, params), dense(step, params), rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=60, deadline=None)
@given(
    requests=st.lists(st.tuples(st.integers(0, 40), st.integers(1, 24)), min_size=1, max_size=6),
    window=st.none() | st.integers(1, 30),
    chunk=st.none() | st.integers(1, 30),
    softcap=st.none() | st.just(3.0),
    sinks=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_spans_see_it_whatever_the_layer_asks_for(
    backend: str,
    requests: list[tuple[int, int]],
    window: int | None,
    chunk: int | None,
    softcap: float | None,
    sinks: bool,
    seed: int,
) -> None:
    step = make_step([new for _, new in requests], [cached + new for cached, new in requests], block_size=3)
    step = spanned(step, seed)
    params = AttentionParams(0.25, window, softcap, torch.tensor([0.5, -1.0, 2.0, 0.0]) if sinks else None, chunk)
    torch.testing.assert_close(step.run(backend, params), dense(step, params), rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("heads", [(4, 4), (8, 2), (6, 1)])
@pytest.mark.parametrize("backend", BACKENDS)
def test_spans_of_heads_that_share_keys(backend: str, heads: tuple[int, int]) -> None:
    step = spanned(make_step(*random_lengths(7), block_size=4, heads=heads), 1)
    params = AttentionParams(scaling=0.2)
    torch.testing.assert_close(step.run(backend, params), dense(step, params), rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_spans_of_windowed_layers_do_not_change_other_layers(backend: str) -> None:
    step = spanned(make_step(*random_lengths(3), block_size=4, seed=3), 3)
    causal = replace(step, metadata=replace(step.metadata, key_ends=None))
    windowed = replace(step, metadata=replace(step.metadata, windowed_ends=True))
    full, window = AttentionParams(scaling=0.2), AttentionParams(scaling=0.2, sliding_window=9)
    assert torch.equal(windowed.run(backend, full), causal.run(backend, full))
    assert torch.equal(windowed.run(backend, window), step.run(backend, window))
    assert not torch.equal(step.run(backend, full), causal.run(backend, full))


def test_a_long_prompt_with_spans_is_computed_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_module, "_MAX_QUERIES", 8)
    step = spanned(make_step([30, 21], [45, 21], block_size=4), 3)
    for params in PARAMS.values():
        torch.testing.assert_close(step.run("cpu", params), dense(step, params), rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["full", "window", "softcap and window", "chunk"])
def test_a_prompt_in_pieces_gives_what_it_gives_at_once(backend: str, name: str) -> None:
    """The prompt is cut between spans, where later pieces and prefix hits begin."""
    ends = np.arange(60) + 1
    ends[5:20] = 20
    ends[33:60] = 60
    whole = with_ends(make_step([60], [60], block_size=4), ends)
    expected = whole.run(backend, PARAMS[name])
    for start, end in ((0, 5), (5, 20), (20, 33), (5, 60), (20, 60), (33, 60)):
        part = slice(start, end)
        of = whole.metadata
        metadata = AttentionMetadata(
            np.array([0, end - start]), np.array([end]), of.block_table, of.slot_mapping[part], 4, ends[part]
        )
        step = Step(whole.query[part], whole.key[part], whole.value[part], whole.cache, metadata)
        torch.testing.assert_close(step.run(backend, PARAMS[name]), expected[part], rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_ends_of_none_but_the_tokens_themselves_change_no_bit(backend: str) -> None:
    step = make_step(*random_lengths(5), block_size=4)
    same = with_ends(step, step.metadata.positions() + 1)
    for params in PARAMS.values():
        assert torch.equal(same.run(backend, params), step.run(backend, params))


@pytest.mark.parametrize("backend", BACKENDS)
def test_requests_without_spans_keep_their_bits_beside_one_that_has_some(backend: str) -> None:
    step = make_step([20, 7, 1], [20, 30, 9], block_size=4)
    ends = step.metadata.positions() + 1
    ends[3:15] = 15
    for params in PARAMS.values():
        beside = with_ends(step, ends).run(backend, params)
        assert torch.equal(beside[20:], step.run(backend, params)[20:])


@pytest.mark.parametrize("backend", BACKENDS)
def test_keys_behind_the_end_are_not_read(backend: str) -> None:
    ends = np.arange(20) + 1
    ends[4:9] = 9
    step = with_ends(make_step([20], [20], block_size=4), ends)
    expected = step.run(backend, PARAMS["full"])
    behind = torch.from_numpy(step.metadata.slots(0, 9, 20))
    step.cache.keys[behind] = step.cache.values[behind] = torch.nan
    step.key[9:] = step.value[9:] = torch.nan
    got = step.run(backend, PARAMS["full"])
    torch.testing.assert_close(got[:9], expected[:9], rtol=1e-5, atol=1e-6)
    assert got[9:].isnan().all()
