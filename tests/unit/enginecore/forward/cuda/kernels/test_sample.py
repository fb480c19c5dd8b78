"""Tokens chosen by kernels against those of the CPU's sampler."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock_enginecore.sample.base import DrawSettings, SamplingInputs, uniforms
from penstock_enginecore.sample.filters import peak
from penstock_enginecore.sample.sampler import TorchSampler
from tests.fakes.models.interpreted_kernels import interpreted
from tests.fakes.models.torch_sampling import TorchSampling

sample = interpreted("sample")

CPU = torch.device("cpu")
NAN, INF = float("nan"), float("inf")
# The interpreter computes with numpy, which warns of infinities and NaN.
pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value|underflow) encountered")


@dataclass
class Settings:
    """Settings of each row."""

    temperature: np.ndarray
    top_k: np.ndarray
    top_p: np.ndarray
    min_p: np.ndarray
    seeds: np.ndarray
    indices: np.ndarray

    @classmethod
    def of(cls, rows: int, seed: int = 0, temperature: float = 1.0, **given: float) -> "Settings":
        random = np.random.default_rng(seed)
        seeds = random.integers(0, 2**64, rows, dtype=np.uint64)
        values = {"top_k": 0, "top_p": 1.0, "min_p": 0.0} | given
        top_k = np.full(rows, values["top_k"], dtype=np.int64)
        top_p, min_p = np.full(rows, values["top_p"]), np.full(rows, values["min_p"])
        return cls(np.full(rows, temperature), top_k, top_p, min_p, seeds, random.integers(0, 2**40, rows))

    def inputs(self) -> SamplingInputs:
        return SamplingInputs(self.settings, uniforms(self.seeds, self.indices))

    @property
    def settings(self) -> DrawSettings:
        return DrawSettings.off(len(self.seeds))._replace(
            temperature=self.temperature, top_k=self.top_k, top_p=self.top_p, min_p=self.min_p
        )

    def draws(self) -> object:
        return sample.Draws(
            torch.from_numpy(self.temperature).float(),
            torch.from_numpy(self.seeds.view(np.int64)),
            torch.from_numpy(self.indices),
            torch.from_numpy(self.settings.max_distance).float(),
            torch.from_numpy(self.top_k).int(),
            torch.from_numpy(self.top_p),
        )


def by_kernels(logits: torch.Tensor, settings: Settings, *, filtered: bool | None = None) -> torch.Tensor:
    rows, vocab = logits.shape
    sampler = sample.TokenSampler(rows + 1, vocab, CPU)
    token_ids, num_nans = torch.full((2, rows + 1), -77, dtype=torch.int32)
    peaks = torch.full((rows + 1,), -77.0)
    if filtered is None:
        filtered = bool(settings.settings.filtered.any())
    draws = settings.draws() if (settings.temperature > 0).any() else None
    sampler.sample(logits, draws, token_ids[:rows], peaks[:rows], num_nans[:rows], filtered=filtered)
    assert (int(token_ids[rows]), float(peaks[rows]), int(num_nans[rows])) == (-77, -77.0, -77)
    wrong = (logits.isnan() | (logits == INF)).sum(dim=1) + (logits == -INF).all(dim=1)
    assert torch.equal(num_nans[:rows].long(), wrong)
    assert torch.equal(peaks[:rows].nan_to_num(99), peak(logits.float())[0].nan_to_num(99))
    return token_ids[:rows].long()


def by_cpu(logits: torch.Tensor, settings: Settings) -> torch.Tensor:
    return torch.from_numpy(TorchSampler().sample(logits.clone(), settings.inputs()).token_ids)


def random_logits(rows: int, vocab: int, seed: int = 0, spread: float = 3.0) -> torch.Tensor:
    return spread * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_greedy_rows_take_the_first_that_is_largest(dtype: torch.dtype) -> None:
    logits = random_logits(6, 9001).to(dtype)
    logits[0, [8999, 4097, 4096]] = 60.0
    logits[1, [9000, 5000]] = INF
    logits[2, [8000, 4500]] = NAN
    logits[3] = -INF
    logits[4, [0, 9000]] = 60.0
    tokens = by_kernels(logits, Settings.of(6, temperature=0.0))
    assert tokens[:5].tolist() == [4096, 5000, 4500, 0, 0]
    assert torch.equal(tokens, by_cpu(logits, Settings.of(6, temperature=0.0)))


@pytest.mark.parametrize("peculiar", [NAN, INF])
def test_rows_without_a_finite_peak_are_greedy(peculiar: float) -> None:
    logits = random_logits(2, 300)
    logits[0, 200:] = peculiar
    settings = Settings.of(2, top_p=0.9)
    assert by_kernels(logits, settings)[0] == 200
    assert torch.equal(by_kernels(logits, settings), by_cpu(logits, settings))


@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.7])
def test_draws_are_the_cpus(temperature: float) -> None:
    """The test makes few draws, because the interpreter is slow. ``test_sampler.py`` compares ten thousand draws in
    plain torch.
    """
    rows, rounds = 40, 3
    drawn = set()
    for i in range(rounds):
        logits = random_logits(rows, 250, seed=i)
        settings = Settings.of(rows, seed=1000 + i, temperature=temperature)
        tokens = by_kernels(logits, settings)
        assert torch.equal(tokens, by_cpu(logits, settings))
        drawn |= set(tokens.tolist())
    assert len(drawn) > 20


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_draws_from_a_large_vocabulary_end_beside_their_number(dtype: torch.dtype) -> None:
    """Rounding may make the CPU choose another token. No draw is further than that from the exact boundaries."""
    rows, vocab = 8, 50257
    logits = random_logits(rows, vocab, spread=1.0).to(dtype)
    settings = Settings.of(rows, seed=5)
    tokens = by_kernels(logits, settings)[:, None]
    cumulative = logits.double().softmax(dim=-1).cumsum(dim=-1)
    number = torch.from_numpy(settings.inputs().uniforms)[:, None]
    assert bool((cumulative.gather(1, tokens) > number - 1e-7).all())
    before = torch.where(tokens > 0, cumulative.gather(1, (tokens - 1).clamp(min=0)), 0.0)
    assert bool((before <= number + 1e-7).all())


@pytest.mark.quick("{'top_k': 5}", "{'top_p': 0.5}", "{'min_p': 0.05}", "{'top_k': 40, 'top_p': 0.9, 'min_p': 0.1}")
@pytest.mark.parametrize(
    "filters",
    [
        {"top_k": 1},
        {"top_k": 5},
        {"top_k": 299},
        {"top_k": 300},
        {"top_k": 5000},
        {"top_p": 0.5},
        {"top_p": 0.97},
        {"top_p": 1e-9},
        {"min_p": 0.05},
        {"min_p": 1.0},
        {"top_k": 40, "top_p": 0.9},
        {"top_k": 40, "top_p": 0.9, "min_p": 0.1},
        {"top_p": 0.9, "min_p": 1e-3},
    ],
    ids=str,
)
def test_filters_leave_what_the_cpus_leave(filters: dict[str, float]) -> None:
    logits = random_logits(12, 300, seed=7, spread=2.0)
    logits[:, ::3] = logits[:, ::3].round()
    logits[6:, ::2] = -INF
    settings = Settings.of(12, seed=8, temperature=1.3, **filters)
    assert torch.equal(by_kernels(logits, settings), by_cpu(logits, settings))


@settings(max_examples=5)
@given(data=st.data())
def test_rows_of_every_kind_in_one_batch(data: st.DataObject) -> None:
    rows = data.draw(st.integers(1, 6))
    vocab = data.draw(st.sampled_from([1, 2, 255, 256, 257, 1500, 4097]))

    def column(values: st.SearchStrategy[float]) -> np.ndarray:
        return np.array(data.draw(st.lists(values, min_size=rows, max_size=rows)))

    made = Settings.of(rows, seed=data.draw(st.integers(0, 99)))
    made.temperature = column(st.sampled_from([0.0, 1e-30, 0.2, 1.0, 5.0]))
    made.top_k = column(st.sampled_from([0, 1, 3, 50, 2000])).astype(np.int64)
    made.top_p = column(st.sampled_from([1.0, 0.3, 0.9, 0.999]))
    made.min_p = column(st.sampled_from([0.0, 0.02, 0.5]))
    logits = random_logits(rows, vocab, seed=data.draw(st.integers(0, 99)))
    tokens = by_kernels(logits, made, filtered=True)
    assert torch.equal(tokens, by_cpu(logits, made))
    # A row's token does not depend on other rows.
    alone = Settings(*(getattr(made, name)[-1:] for name in made.__dataclass_fields__))
    assert by_kernels(logits[-1:].contiguous(), alone, filtered=True).tolist() == tokens[-1:].tolist()


def test_tokens_that_are_out_are_never_drawn() -> None:
    logits = torch.full((40, 1000), -INF)
    logits[:, [255, 256, 511]] = torch.tensor([0.0, 1.0, -90.0])
    tokens = by_kernels(logits, Settings.of(40, seed=3))
    assert set(tokens.tolist()) == {255, 256}


@pytest.mark.slow
def test_random_numbers_are_the_cpus_bit_for_bit() -> None:
    """If 2**18 tokens have equal weights, the first 18 of a number's 53 bits choose the token."""
    rows, vocab = 6, 2**18
    settings = Settings.of(rows, seed=11)
    settings.seeds[0], settings.indices[1] = 2**64 - 1, 2**63 - 1
    tokens = by_kernels(torch.zeros(1, vocab).expand(rows, -1).contiguous(), settings)
    assert tokens.tolist() == (settings.inputs().uniforms * vocab).astype(np.int64).tolist()


@pytest.mark.parametrize(("filtered", "expected"), [(None, 2), (False, 4), (True, 8)])
def test_a_step_has_few_launches(filtered: bool | None, expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A captured step has these launches, whatever its requests need. ``filtered``: None for greedy sampling."""
    launched = []

    class Counted:
        def __init__(self, name: str) -> None:
            self.name = name

        def __getitem__(self, grid: object) -> Callable[..., None]:
            return lambda *_, **__: launched.append(self.name)

    for module in (sample, interpreted("filters")):
        for name in ("_peaks", "_settle", "_sum", "_draw", "_tally", "_refine", "_gather", "_finish"):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, Counted(name))
    settings = Settings.of(2)
    vectors = torch.zeros(3, 2)
    draws = None if filtered is None else settings.draws()
    sampler = sample.TokenSampler(2, 9000, CPU)
    sampler.sample(torch.zeros(2, 9000), draws, vectors[0].int(), vectors[1], vectors[2].int(), filtered=bool(filtered))
    assert len(launched) == len(set(launched)) == expected


def test_other_shapes_are_refused() -> None:
    sampler, draws, two, three = sample.TokenSampler(2, 10, CPU), Settings.of(3).draws(), torch.zeros(2), torch.zeros(3)
    with pytest.raises(ValueError, match=r"logits have shape \[3, 10\]; there is memory for 2 contiguous rows of 10"):
        sampler.sample(torch.zeros(3, 10), draws, three.int(), three, three.int(), filtered=False)
    with pytest.raises(
        ValueError, match=r"the logits have 2 rows, which does not match \[3\] tokens, \[2\] peaks and \[2\] counts"
    ):
        sampler.sample(torch.zeros(2, 10), draws, three.int(), two, two.int(), filtered=False)


@pytest.mark.slow
def test_the_twin_in_plain_torch_chooses_the_same() -> None:
    """Ten thousand of the twin's draws stand for the kernels'."""
    logits = random_logits(40, 700, seed=3)
    logits[5, [3, 600]] = NAN
    made = Settings.of(40, seed=12)
    random = np.random.default_rng(1)
    made.temperature = random.choice([0.0, 0.4, 1.0, 2.0], 40)
    made.top_k = random.choice([0, 0, 1, 9, 900], 40)
    made.top_p = random.choice([1.0, 0.6, 0.95], 40)
    made.min_p = random.choice([0.0, 0.0, 0.1], 40)
    token_ids, num_nans = torch.zeros(2, 40, dtype=torch.int32)
    TorchSampling(40, 700, CPU).sample(logits, made.draws(), token_ids, torch.zeros(40), num_nans, filtered=True)
    assert torch.equal(by_kernels(logits, made, filtered=True), token_ids.long())
    assert num_nans.nonzero().tolist() == [[5]]
