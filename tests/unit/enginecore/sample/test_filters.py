"""Filters over wide vocabularies, whose stages must not show."""

import numpy as np
import pytest
import torch

from penstock_enginecore.sample import filters
from penstock_enginecore.sample.base import DrawSettings, SamplingInputs
from penstock_enginecore.sample.filters import draw, draw_among, largest, peak
from penstock_enginecore.sample.sampler import TorchSampler

sample = TorchSampler().sample

VOCAB = 9001
"""Size of the vocabulary: no multiple of any block, and large enough for every stage."""


def make_inputs(rows: int, **values: float) -> SamplingInputs:
    defaults = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | values
    columns = {name: np.full(rows, value) for name, value in defaults.items()}
    columns["top_k"] = columns["top_k"].astype(np.int64)
    return SamplingInputs(DrawSettings.off(rows)._replace(**columns), np.random.default_rng(3).random(rows))


def exact_token(row: torch.Tensor, inputs: SamplingInputs, i: int) -> int:
    """Return the token of row ``i``, computed in float64 with every filter over the whole sorted row."""
    logits, settings = row.double().numpy(), inputs.settings
    weights = np.exp((logits - logits.max()) / settings.temperature[i])
    order = np.argsort(-logits, kind="stable")
    weights[weights < settings.min_p[i]] = 0
    if settings.top_k[i]:
        weights[order[settings.top_k[i] :]] = 0
    cumulative = np.cumsum(weights[order])
    weights[order[cumulative - weights[order] >= settings.top_p[i] * cumulative[-1]]] = 0
    cumulative = np.cumsum(weights)
    return int(np.searchsorted(cumulative, inputs.uniforms[i] * cumulative[-1], side="right"))


@pytest.mark.parametrize("scale", [0.1, 1.0, 4.0], ids=["flat", "even", "peaked"])
@pytest.mark.parametrize(
    "values",
    [
        {},
        {"temperature": 0.6},
        {"top_k": 40},
        {"top_k": 128},
        {"top_k": 700},
        {"top_k": 5000},
        {"top_p": 0.1},
        {"top_p": 0.5},
        {"top_p": 0.95},
        {"top_p": 0.999999},
        {"min_p": 0.5},
        {"min_p": 0.001},
        {"top_k": 300, "top_p": 0.7},
        {"top_k": 3000, "top_p": 0.9, "min_p": 0.001, "temperature": 1.5},
        {"min_p": 0.02, "top_p": 0.8},
    ],
    ids=str,
)
def test_every_stage_gives_the_exact_token(values: dict[str, float], scale: float) -> None:
    rows = torch.randn(12, VOCAB, generator=torch.Generator().manual_seed(1)) * scale
    inputs = make_inputs(12, **values)
    assert inputs.settings.filtered.all() == bool(values.keys() - {"temperature"})
    assert sample(rows, inputs).token_ids.tolist() == [exact_token(rows[i], inputs, i) for i in range(12)]


@pytest.mark.parametrize("rows_at_a_time", [7, 48])
@pytest.mark.parametrize("threads", [1, 2])
def test_a_row_gets_the_same_token_alone_and_beside_others(
    threads: int, rows_at_a_time: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(filters, "_CPU_SLICE", rows_at_a_time * VOCAB)
    generator = np.random.default_rng(0)
    scales = torch.from_numpy(generator.choice([0.1, 1.0, 4.0], (48, 1)))
    rows = (torch.randn(48, VOCAB, generator=torch.Generator().manual_seed(2)) * scales).float()
    together = SamplingInputs(
        DrawSettings.off(48)._replace(
            temperature=generator.choice([0.0, 0.5, 1.0, 2.0], 48),
            top_k=generator.choice([0, 0, 1, 50, 500, 4000], 48),
            top_p=generator.choice([1.0, 0.95, 0.5], 48),
            min_p=generator.choice([0.0, 0.0, 0.001, 0.2], 48),
        ),
        uniforms=generator.random(48),
    )
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        expected = sample(rows, together).token_ids.tolist()
        alone = []
        for i in range(48):
            one = slice(i, i + 1)
            parameters = SamplingInputs(together.settings.of(one), together.uniforms[one])
            alone.append(int(sample(rows[one], parameters).token_ids[0]))
    finally:
        torch.set_num_threads(before)
    assert alone == expected


def test_ties_beyond_the_likeliest_that_were_looked_at_are_kept() -> None:
    row = torch.zeros(1, VOCAB)
    inputs = make_inputs(400, top_k=5)
    chosen = sample(row.expand(400, -1), inputs).token_ids
    assert chosen.tolist() == np.floor(inputs.uniforms * VOCAB).astype(int).tolist()


def test_a_mask_that_leaves_fewer_than_top_k_tokens_is_drawn_from() -> None:
    row = torch.full((1, VOCAB), -torch.inf)
    row[0, [7, 4000, 9000]] = torch.tensor([1.0, 1.0, 1.0])
    inputs = make_inputs(200, top_k=50, top_p=0.999)
    assert set(sample(row.expand(200, -1), inputs).token_ids.tolist()) == {7, 4000, 9000}


@pytest.mark.parametrize("width", [1, 2, 255, 256, 257, 1000, 9001])
def test_the_peak_is_the_first_largest_value(width: int) -> None:
    rows = torch.randint(0, 40, (20, width), generator=torch.Generator().manual_seed(width)).float()
    values, columns = peak(rows)
    assert values.tolist() == rows.max(dim=-1).values.tolist()
    assert columns.tolist() == [row.index(max(row)) for row in rows.tolist()]


def test_a_peak_that_is_no_number_is_found() -> None:
    rows = torch.zeros(3, 1000)
    rows[1, 600] = torch.nan
    assert peak(rows)[0].isnan().tolist() == [False, True, False]
    assert peak(rows)[1].tolist() == [0, 600, 0]


@pytest.mark.parametrize(("width", "count"), [(300, 128), (9001, 10), (9001, 128), (70_001, 1024), (9001, 9001)])
def test_the_largest_values_are_those_of_a_sort(width: int, count: int) -> None:
    rows = torch.randn(5, width, generator=torch.Generator().manual_seed(width))
    values, columns = largest(rows, count)
    assert values.tolist() == rows.sort(dim=-1, descending=True).values[:, :count].tolist()
    assert rows.gather(1, columns).tolist() == values.tolist()


@pytest.mark.parametrize("width", [1, 3, 256, 1000])
def test_both_draws_invert_the_cumulative_weights(width: int) -> None:
    generator = torch.Generator().manual_seed(width)
    weights = torch.rand(50, width, generator=generator) * (torch.rand(50, width, generator=generator) < 0.5)
    weights[:, 0] = 1e-3
    uniforms = torch.rand(50, 1, dtype=torch.float64, generator=generator)
    cumulative = weights.double().cumsum(-1)
    expected = torch.searchsorted(cumulative, uniforms * cumulative[:, -1:], right=True).squeeze(1).tolist()
    order = torch.stack([torch.randperm(width, generator=generator) for _ in range(50)])
    assert draw(weights, uniforms).tolist() == expected
    assert draw_among(order, weights.gather(1, order), uniforms).tolist() == expected


def test_the_largest_uniform_reaches_the_last_token_with_any_weight() -> None:
    weights = torch.rand(20, 1000, generator=torch.Generator().manual_seed(9))
    weights[:, 900:] = 0.0
    uniforms = torch.full((20, 1), 1 - 2.0**-53, dtype=torch.float64)
    assert draw(weights, uniforms).tolist() == [899] * 20
