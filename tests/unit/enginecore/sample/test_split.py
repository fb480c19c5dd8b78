"""Tokens from sharded logits equal those from full logits, on every rank. For greedy tokens no rank sees all logits."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np
import pytest
import torch

from penstock_enginecore.parallel.sharding import SplitVocabulary
from penstock_enginecore.sample.base import DrawSettings, SampledTokens, SamplingInputs
from penstock_enginecore.sample.sampler import SplitSampler, TorchSampler
from tests.fakes.engines.thread_collectives import ThreadCollectives, thread_ranks

T = TypeVar("T")


def inputs(rows: int, temperature: float) -> SamplingInputs:
    return SamplingInputs(
        DrawSettings.off(rows)._replace(temperature=np.full(rows, temperature)), np.linspace(0.1, 0.9, rows)
    )


def on_all_ranks(size: int, run: Callable[[ThreadCollectives], T]) -> list[T]:
    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(run, thread_ranks(size)))


def own_columns(logits: torch.Tensor, rank: int, width: int) -> torch.Tensor:
    """Return a rank's columns, padded with zeros. Zero would be the maximum if all logits are negative."""
    own = logits[:, rank * width : (rank + 1) * width]
    return torch.cat([own, own.new_zeros(len(own), width - own.shape[1])], dim=1)


def sampled(
    logits: torch.Tensor, size: int, temperature: float, monkeypatch: pytest.MonkeyPatch | None
) -> list[SampledTokens]:
    width = -(-logits.shape[1] // size)

    def run(group: ThreadCollectives) -> SampledTokens:
        vocabulary = SplitVocabulary(group, logits.shape[1], width)
        sampler = SplitSampler(TorchSampler(), vocabulary)
        return sampler.sample(own_columns(logits, group.rank, width), inputs(len(logits), temperature))

    if monkeypatch is not None:
        monkeypatch.delattr(SplitVocabulary, "whole")
    return on_all_ranks(size, run)


@pytest.mark.parametrize(("vocab", "size"), [(64, 2), (67, 4), (5, 4)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_greedy_tokens_need_no_logits_of_others(
    vocab: int, size: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits = (torch.randn(9, vocab, generator=torch.Generator().manual_seed(3)) - 9).to(dtype)
    logits[1] = -2.0  # all logits are equal, so the first token wins
    logits[2, [vocab - 1, vocab // 2]] = 5.0
    expected = TorchSampler().sample(logits, inputs(9, 0.0)).token_ids
    for rank in sampled(logits, size, 0.0, monkeypatch):
        assert rank.token_ids.tolist() == expected.tolist()
        assert rank.token_ids.dtype == expected.dtype
        assert rank.num_nans is None


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("column", [0, 40, slice(None)])
def test_rows_without_a_finite_peak_are_sampled_whole(bad: float, column: int | slice) -> None:
    logits = torch.randn(3, 64, generator=torch.Generator().manual_seed(4))
    logits[1, column] = bad
    expected = TorchSampler().sample(logits.clone(), inputs(3, 0.0))
    for rank in sampled(logits, 2, 0.0, None):
        assert rank.token_ids.tolist() == expected.token_ids.tolist()
        assert (rank.num_nans is None) == (expected.num_nans is None)
        assert expected.num_nans is None or rank.num_nans is None or (rank.num_nans == expected.num_nans).all()


def test_draws_are_those_from_whole_logits() -> None:
    logits = torch.randn(7, 67, generator=torch.Generator().manual_seed(5))
    expected = TorchSampler().sample(logits.clone(), inputs(7, 0.9)).token_ids
    for rank in sampled(logits, 4, 0.9, None):
        assert rank.token_ids.tolist() == expected.tolist()


def test_logits_that_are_whole_already_are_left_so() -> None:
    logits = torch.randn(3, 64, generator=torch.Generator().manual_seed(6))
    # The other rank never enters the collective.
    sampler = SplitSampler(TorchSampler(), SplitVocabulary(thread_ranks(2)[0], 64, 32))
    assert sampler.sample(logits, inputs(3, 0.0)).token_ids.tolist() == logits.argmax(-1).tolist()


def test_a_head_leaves_its_logits_apart_in_a_block_alone() -> None:
    def run(group: ThreadCollectives) -> list[torch.Size]:
        vocabulary = SplitVocabulary(group, 7, 4)
        own = torch.zeros(2, 4)
        with vocabulary.apart():
            apart = vocabulary.finish(own)
        return [apart.shape, vocabulary.finish(own).shape]

    assert on_all_ranks(2, run) == [[(2, 4), (2, 7)]] * 2
