"""Sums and gathers in shared memory: torch's results, and the same bits on every rank."""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock_common.errors import ConfigError
from penstock_enginecore.parallel import collectives
from penstock_enginecore.parallel.collectives import PIECE, SharedMemoryCollectives
from tests.fakes.patience import PATIENCE

T = TypeVar("T")
pytestmark = pytest.mark.skipif(not collectives.available(), reason="the package was built without a compiler")


class Ranks:
    """Ranks that each have a thread and a mapping of the memory."""

    def __init__(self, size: int) -> None:
        self.size = size
        memory = collectives.create(size)
        self.each = [SharedMemoryCollectives(memory, rank, size) for rank in range(size)]
        os.close(memory)
        self._threads = ThreadPoolExecutor(size)

    def run(self, work: Callable[[SharedMemoryCollectives], T]) -> list[T]:
        return [future.result(PATIENCE) for future in [self._threads.submit(work, rank) for rank in self.each]]

    def close(self) -> None:
        self._threads.shutdown()


@pytest.fixture(params=[2, 3, 5])
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    ranks = Ranks(request.param)
    yield ranks
    ranks.close()


def given_to(rank: int, count: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(100 * seed + rank)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", [1, 7, 768 * 16, PIECE // 4, PIECE // 4 + 1, PIECE + 3])
def test_sums_are_torchs_in_the_order_of_the_ranks(ranks: Ranks, count: int, dtype: torch.dtype) -> None:
    whole = [given_to(rank, count, dtype, seed=count) for rank in range(ranks.size)]
    expected = whole[0].float()
    for other in whole[1:]:
        expected = expected + other.float()
    found = ranks.run(lambda group: group.all_reduce(whole[group.rank].clone()))
    for each in found:
        assert torch.equal(each, expected.to(dtype))


@settings(max_examples=20, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(1, 3 * PIECE // 4)), min_size=1, max_size=12), st.integers(2, 4))
def test_any_order_of_sums_and_gathers_stays_in_step(calls: list[tuple[bool, int]], size: int) -> None:
    ranks = Ranks(size)

    def work(group: SharedMemoryCollectives) -> bool:
        right = True
        for seed, (sums, count) in enumerate(calls):
            whole = [given_to(rank, count, torch.float32, seed) for rank in range(size)]
            if sums:
                right &= torch.allclose(
                    group.all_reduce(whole[group.rank].clone()), torch.stack(whole).sum(0), atol=1e-5
                )
            else:
                right &= all(map(torch.equal, group.all_gather(whole[group.rank]), whole))
        return right

    assert all(ranks.run(work))
    ranks.close()


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan"), 3.4e38])
def test_bfloat16_keeps_what_is_no_number(value: float) -> None:
    ranks = Ranks(2)
    expected = (torch.tensor([value]).to(torch.bfloat16).float() * 2).to(torch.bfloat16)
    for found in ranks.run(lambda group: group.all_reduce(torch.tensor([value]).to(torch.bfloat16))):
        assert torch.equal(found.isnan(), expected.isnan())
        assert torch.equal(found.nan_to_num(), expected.nan_to_num())
    ranks.close()


def test_other_numbers_and_memory_are_refused() -> None:
    memory = collectives.create(2)
    with pytest.raises(ValueError, match=r"descriptor \d+ has \d+ bytes, but 3 ranks need \d+"):
        SharedMemoryCollectives(memory, 0, 3)
    with pytest.raises(TypeError, match=r"dtype .*; the tensor has dtype torch\.float64, and is contiguous"):
        SharedMemoryCollectives(memory, 0, 2).all_reduce(torch.zeros(2, dtype=torch.float64))
    os.close(memory)


def test_without_the_library_the_setting_is_refused_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = collectives.create(2)
    monkeypatch.setattr(collectives, "available", lambda: False)
    with pytest.raises(ConfigError, match="executor.collectives is 'shm', but the CPU kernels are missing"):
        SharedMemoryCollectives(memory, 0, 2)
    os.close(memory)
