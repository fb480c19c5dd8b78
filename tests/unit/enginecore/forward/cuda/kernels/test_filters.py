"""Tokens that the kernels of filters keep, against sorting and summing in plain torch."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from penstock_enginecore.forward.cuda.kernel_api import Draws
from penstock_enginecore.sample.base import DrawSettings, PlainDraws
from tests.fakes.models.interpreted_kernels import interpreted
from tests.fakes.models.torch_sampling import limits_of

filters = interpreted("filters")

CPU = torch.device("cpu")
INF = float("inf")
# The interpreter computes with numpy, which warns of infinities.
pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value|underflow|divide by zero) encountered")

SETTINGS = [  # temperature, top_k, top_p, min_p
    (1.0, 0, 1.0, 0.0),
    (1.0, 1, 1.0, 0.0),
    (0.7, 20, 1.0, 0.0),
    (1.0, 20, 0.95, 0.0),
    (1.3, 2500, 1.0, 0.0),
    (1.3, 2500, 0.9, 0.0),
    (1.0, 0, 0.5, 0.0),
    (1.0, 0, 0.95, 0.0),
    (1.0, 0, 0.99999, 0.0),
    (1.0, 0, 1e-9, 0.0),
    (2.0, 0, 1.0, 0.05),
    (1.0, 50, 0.9, 0.02),
    (1.0, 0, 0.8, 0.001),
    (0.0, 20, 0.95, 0.0),
    (1e-30, 20, 0.95, 0.0),
    (1e30, 20, 0.95, 0.0),
    (30.0, 0, 0.9, 0.0),
]
"""Settings of the rows of one batch: rows without filters, with each filter, with several, and greedy rows."""


def draws_of(settings: list[tuple[float, int, float, float]]) -> Draws:
    temperature, top_k, top_p, min_p = (np.array(column) for column in zip(*settings, strict=True))
    rows = len(settings)
    seeds, indices = np.zeros(rows, dtype=np.uint64), np.zeros(rows, dtype=np.int64)
    made = PlainDraws.of(DrawSettings(temperature, top_k, top_p, min_p), seeds, indices)
    columns = (made.temperature, seeds.view(np.int64), indices, made.max_distance, made.top_k, made.top_p)
    return Draws(*map(torch.from_numpy, columns))


def limits_by_kernels(logits: torch.Tensor, draws: Draws, part: int = 1024) -> torch.Tensor:
    rows, vocab = logits.shape
    search = filters.RowFilters(rows + 1, vocab, part, CPU)
    search.limits.fill_(-77.0)
    search.launch(logits, logits.float().amax(dim=1), draws)
    assert float(search.limits[rows]) == -77.0
    assert not search.tallies[rows].any()
    return search.limits[:rows]


def check(logits: torch.Tensor, settings: list[tuple[float, int, float, float]], part: int = 1024) -> None:
    """Check that each row keeps the same tokens of weights other than 0."""
    draws = draws_of(settings)
    limits = limits_by_kernels(logits, draws, part)
    value = logits.float()
    distance = (value.amax(dim=1, keepdim=True) - value) / draws.temperature[:, None]
    weight = torch.exp(-distance.double()).float().double()
    expected = limits_of(distance, weight, draws)
    is_drawn = (draws.temperature > 0) & value.amax(dim=1).isfinite()
    kept, wanted = ((distance <= limit[:, None]) & (weight > 0) & is_drawn[:, None] for limit in (limits, expected))
    wrong = (kept != wanted).any(dim=1).nonzero().flatten().tolist()
    assert not wrong, [(settings[row], float(limits[row]), float(expected[row])) for row in wrong]


def normal(rows: int, vocab: int, spread: float = 3.0, seed: int = 0) -> torch.Tensor:
    return spread * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed))


def masked(rows: int, vocab: int, left: int, value: float) -> torch.Tensor:
    """Return logits of which only ``left`` in each row are not ``value``."""
    logits = normal(rows, vocab)
    return logits.where(torch.arange(vocab) % (vocab // left) == 1, value)


def with_ties_behind_the_peak(rows: int, vocab: int) -> torch.Tensor:
    """Return logits with more equal keys in one bucket than fit in memory."""
    logits = torch.full((rows, vocab), 1.5)
    logits[:, 7] = 4.0
    logits[:, 9] = 0.25
    return logits


KINDS: dict[str, Callable[[int, int], torch.Tensor]] = {
    "normal": normal,
    "flat": lambda rows, vocab: normal(rows, vocab, 0.5),
    "almost constant": lambda rows, vocab: normal(rows, vocab, 1e-3),
    "peaked": lambda rows, vocab: normal(rows, vocab, 12.0),
    "bfloat16": lambda rows, vocab: normal(rows, vocab, 4.0).bfloat16().float(),
    "rounded": lambda rows, vocab: normal(rows, vocab, 2.0).round(),
    "constant": lambda rows, vocab: torch.full((rows, vocab), -2.5),
    "ties": with_ties_behind_the_peak,
    "masked": lambda rows, vocab: masked(rows, vocab, 10, -INF),
    "masked by a finite value": lambda rows, vocab: masked(rows, vocab, 40, -3.0e38),
    "one token left": lambda rows, vocab: masked(rows, vocab, 1, -INF),
    "no token left": lambda rows, vocab: torch.full((rows, vocab), -INF),
}


@pytest.mark.quick("normal", "bfloat16", "ties", "masked")
@pytest.mark.parametrize("kind", KINDS)
def test_rows_with_and_without_filters_keep_the_same_tokens(kind: str) -> None:
    check(KINDS[kind](len(SETTINGS), 3000), SETTINGS)


@pytest.mark.parametrize("vocab", [1, 2, 255, 257, 1500])
def test_small_vocabularies_and_partial_parts(vocab: int) -> None:
    check(
        normal(4, vocab, seed=vocab), [(1.0, 3, 0.9, 0.0), (1.0, 0, 0.7, 0.0), (1.0, 200, 1.0, 0.0), SETTINGS[0]], 256
    )


@pytest.mark.slow
@pytest.mark.parametrize("spread", [0.4, 3.0])
def test_the_largest_vocabulary(spread: float) -> None:
    settings = [(1.0, 0, 0.95, 0.0), (0.6, 40, 0.95, 0.0), (1.0, 5000, 1.0, 0.0)]
    check(normal(3, 262_144, spread).bfloat16().float(), settings, 4096)


def test_limits_are_bit_identical_for_every_division_of_rows() -> None:
    logits, draws = normal(3, 2000), draws_of([(1.0, 0, 0.95, 0.0), (1.0, 40, 0.9, 0.0), (0.8, 7, 1.0, 0.0)])
    limits = [limits_by_kernels(logits, draws, part) for part in (256, 512, 2048)]
    assert torch.equal(limits[0], limits[1])
    assert torch.equal(limits[0], limits[2])


def test_limits_depend_only_on_their_row() -> None:
    logits, settings = normal(3, 700), [(1.0, 0, 0.95, 0.0), (1.0, 40, 0.9, 0.0), (0.8, 7, 1.0, 0.0)]
    together = limits_by_kernels(logits, draws_of(settings))
    alone = [limits_by_kernels(logits[row : row + 1], draws_of(settings[row : row + 1])) for row in range(3)]
    assert torch.equal(together, torch.cat(alone))


def test_a_share_that_ends_with_a_token_keeps_no_token_more() -> None:
    """Sums are exact, so the tokens up to a boundary that is exactly reached are enough."""
    logits = torch.full((2, 300), -INF)
    logits[:, [3, 250]] = 0.0
    logits[1, 250] = -0.5
    limits = limits_by_kernels(logits, draws_of([(1.0, 0, 0.5, 0.0), (1.0, 0, 0.5, 0.0)]))
    assert limits.tolist() == [0.0, 0.0]
