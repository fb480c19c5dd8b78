"""The sampler against distributions computed the long way."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock_enginecore.sample.base import DrawSettings, SamplingInputs, uniforms
from penstock_enginecore.sample.rules import Entries, LogitRules
from penstock_enginecore.sample.sampler import TorchSampler, final_runs

sample = TorchSampler().sample

VOCAB = 300


def inputs(
    rows: int,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    draws: np.ndarray | None = None,
    banned: Sequence[tuple[int, Sequence[int]]] = (),
) -> SamplingInputs:
    return SamplingInputs(
        DrawSettings.off(rows)._replace(
            temperature=np.full(rows, temperature),
            top_k=np.full(rows, top_k, dtype=np.int64),
            top_p=np.full(rows, top_p),
            min_p=np.full(rows, min_p),
        ),
        uniforms=np.full(rows, 0.5) if draws is None else draws,
        rules=LogitRules(banned=Entries.join([(row, np.array(ids)) for row, ids in banned]) if banned else None),
    )


def logits(rows: int, vocab: int = VOCAB, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 2


def exact_distribution(row: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    """Apply temperature, min_p, top_k and top_p in plain numpy, token by token in order of probability."""
    scaled = row.double().numpy() / temperature
    weights = np.exp(scaled - scaled.max())
    weights[weights < min_p] = 0
    order = np.argsort(-weights, kind="stable")
    if top_k:
        weights[order[top_k:]] = 0
    probabilities = weights / weights.sum()
    if top_p < 1:
        before = np.cumsum(probabilities[order]) - probabilities[order]
        probabilities[order[before >= top_p]] = 0
    return probabilities / probabilities.sum()


FILTERS = [
    (1.0, 0, 1.0, 0.0),
    (0.7, 0, 1.0, 0.0),
    (1.0, 25, 1.0, 0.0),
    (1.0, 1, 1.0, 0.0),
    (1.0, 0, 0.9, 0.0),
    (3.0, 0, 0.999, 0.0),
    (1.0, 0, 1.0, 0.1),
    (1.3, 40, 0.8, 0.02),
    (1.0, VOCAB + 5, 0.5, 0.0),
]


@pytest.mark.slow
@pytest.mark.parametrize(("temperature", "top_k", "top_p", "min_p"), FILTERS)
def test_draws_follow_the_filtered_distribution(temperature: float, top_k: int, top_p: float, min_p: float) -> None:
    num_draws = 20_000
    row = logits(1)
    expected = exact_distribution(row[0], temperature, top_k, top_p, min_p) * num_draws
    draws = uniforms(np.full(num_draws, 99, dtype=np.uint64), np.arange(num_draws))
    counts = np.zeros(VOCAB)
    for part in np.array_split(draws, 10):
        params = inputs(len(part), temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, draws=part)
        chosen = sample(row.expand(len(part), -1), params).token_ids
        counts += np.bincount(chosen, minlength=VOCAB)
    assert counts[expected == 0].sum() == 0
    common = expected >= 5
    rest = max(expected[~common].sum(), 1e-9)
    chi_square = ((counts - expected)[common] ** 2 / expected[common]).sum()
    chi_square += (counts[~common].sum() - expected[~common].sum()) ** 2 / rest
    degrees = max(common.sum(), 1)
    assert chi_square < degrees + 4 * np.sqrt(2 * degrees) + 8


@settings(max_examples=60, deadline=None)
@given(
    temperature=st.floats(0.05, 5),
    top_k=st.integers(0, 400),
    top_p=st.floats(0.01, 1),
    min_p=st.floats(0, 1),
    uniform=st.floats(0, 1, exclude_max=True),
    seed=st.integers(0, 1000),
)
def test_every_draw_inverts_the_exact_distribution(
    temperature: float, top_k: int, top_p: float, min_p: float, uniform: float, seed: int
) -> None:
    row = logits(1, seed=seed)
    params = inputs(1, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, draws=np.array([uniform]))
    token = int(sample(row, params).token_ids[0])
    # A filter's own boundary may round either way: allow for it on both sides.
    near = [
        exact_distribution(row[0], temperature, top_k, min(p, 1.0), m)
        for p in (top_p * (1 - 1e-5), top_p, top_p * (1 + 1e-5))
        for m in (min_p * (1 - 1e-5), min_p, min(min_p * (1 + 1e-5), 1.0))
    ]
    assert any(
        p[token] > 0 and np.cumsum(p)[token] - p[token] - 1e-4 <= uniform <= np.cumsum(p)[token] + 1e-4 for p in near
    )


def test_greedy_takes_the_largest_logit() -> None:
    rows = logits(8)
    assert sample(rows, inputs(8, temperature=0.0)).token_ids.tolist() == rows.argmax(-1).tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_row_gets_the_same_token_alone_and_in_a_mixed_batch(dtype: torch.dtype) -> None:
    rows = logits(32, vocab=5000).to(dtype)
    generator = np.random.default_rng(0)
    batch = SamplingInputs(
        DrawSettings.off(32)._replace(
            temperature=generator.choice([0.0, 0.5, 1.0, 2.0], 32),
            top_k=generator.choice([0, 1, 10, 300], 32),
            top_p=generator.choice([1.0, 0.95, 0.5], 32),
            min_p=generator.choice([0.0, 0.01, 0.2], 32),
        ),
        uniforms=generator.random(32),
    )
    together = sample(rows, batch).token_ids.tolist()
    apart = []
    for i in range(32):
        one = slice(i, i + 1)
        params = SamplingInputs(batch.settings.of(one), batch.uniforms[one])
        apart.append(int(sample(rows[one], params).token_ids[0]))
    assert together == apart


def test_rounding_noise_in_the_logits_does_not_change_draws() -> None:
    rows = logits(200, vocab=1000)
    noisy = rows * (1 + 1e-6 * torch.randn(rows.shape, generator=torch.Generator().manual_seed(5)))
    params = inputs(200, top_p=0.95, draws=np.random.default_rng(1).random(200))
    assert sample(rows, params).token_ids.tolist() == sample(noisy, params).token_ids.tolist()


def test_tokens_that_tie_with_the_last_one_kept_are_kept() -> None:
    row = torch.tensor([[1.0, 3.0, 2.0, 2.0, 2.0]])
    chosen = {int(sample(row, inputs(1, top_k=2, draws=np.array([u]))).token_ids[0]) for u in np.linspace(0, 0.999, 50)}
    assert chosen == {1, 2, 3, 4}


def test_the_unit_intervals_ends_select_the_first_and_last_token_with_weight() -> None:
    row = torch.tensor([[-torch.inf, 1.0, 0.0, 1.0, -torch.inf]])
    draws = np.array([0.0, 1 - 2.0**-53])
    assert sample(row.expand(2, -1), inputs(2, draws=draws)).token_ids.tolist() == [1, 3]


def test_banned_tokens_are_not_chosen() -> None:
    rows = logits(3)
    best = rows.argmax(-1).tolist()
    chosen = sample(rows, inputs(3, temperature=0.0, banned=[(1, [best[1], 7])])).token_ids.tolist()
    assert chosen[0] == best[0]
    assert chosen[2] == best[2]
    assert chosen[1] not in (best[1], 7)


@pytest.mark.parametrize("temperature", [1e-320, 1e-40, 1e40, 1e308])
def test_extreme_temperatures_give_a_token_of_the_vocabulary(temperature: float) -> None:
    rows = logits(2)
    chosen = sample(rows, inputs(2, temperature=temperature, banned=[(0, [3])])).token_ids
    assert ((chosen >= 0) & (chosen < VOCAB)).all()
    if temperature < 1:
        assert chosen[1] == rows[1].argmax()


def test_nans_are_counted_per_row() -> None:
    rows = logits(3)
    assert sample(rows, inputs(3)).num_nans is None
    rows[1, 4:6] = torch.nan
    for temperature in (0.0, 1.0):
        num_nans = sample(rows, inputs(3, temperature=temperature, top_p=0.9)).num_nans
        assert num_nans is not None
        assert num_nans.tolist() == [0, 2, 0]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_infinite_logits_are_counted_per_row(temperature: float) -> None:
    rows = logits(4)
    rows[1, 4:6] = torch.inf
    rows[2, 7] = -torch.inf
    rows[3] = -torch.inf
    num_nans = sample(rows, inputs(4, temperature=temperature, top_p=0.9)).num_nans
    assert num_nans is not None
    assert num_nans.tolist() == [0, 2, 0, rows.shape[1]]


# Drafts are accepted up to the first one that differs from its row's sampled token.


def counted(sampled: list[list[int]], drafts: list[list[int]], num_rows: list[int] | None = None) -> list[int]:
    flat = np.array([token for rows in sampled for token in rows], dtype=np.int64)
    runs = final_runs(flat, num_rows or [len(d) + 1 for d in drafts], drafts)
    assert all(run == rows[: len(run)] for run, rows in zip(runs, sampled, strict=True))
    return [len(run) for run in runs]


@pytest.mark.parametrize(
    ("sampled", "drafts", "count"),
    [
        ([5], [], 1),
        ([5, 6, 7], [5, 6], 3),
        ([5, 6, 7], [5, 9], 2),
        ([5, 6, 7], [9, 6], 1),
        ([5, 6, 7], [9, 9], 1),
    ],
)
def test_a_run_ends_at_the_first_difference_or_one_token_after_the_last_draft(sampled, drafts, count) -> None:
    assert counted([sampled], [drafts]) == [count]


def test_rows_that_cannot_be_reached_end_it_too() -> None:
    assert counted([[5, 6, 7]], [[5, 6]], num_rows=[2]) == [2]
    assert counted([[5, 6, 7]], [[5, 6]], num_rows=[1]) == [1]


@given(st.lists(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), max_size=5), min_size=1, max_size=4))
def test_requests_do_not_concern_each_other(runs) -> None:
    drafts = [[draft for _, draft in run] for run in runs]
    sampled = [[token for token, _ in run] + [1] for run in runs]
    together = counted(sampled, drafts)
    assert together == [counted([rows], [guessed])[0] for rows, guessed in zip(sampled, drafts, strict=True)]
    for count, rows, guessed in zip(together, sampled, drafts, strict=True):
        assert rows[: count - 1] == guessed[: count - 1]
        assert count == len(rows) or rows[count - 1] != guessed[count - 1]
