"""Collectives between ranks that are threads of the test."""

import threading
from typing import Any

import torch

from tests.fakes.patience import PATIENCE


class ThreadCollectives:
    """Collectives of one rank that is a thread of the test."""

    def __init__(self, rank: int, size: int, given: list[Any], barrier: threading.Barrier) -> None:
        self.rank, self.size = rank, size
        self._given, self._barrier = given, barrier

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        self._given[self.rank] = tensor.clone()
        self._barrier.wait(PATIENCE)
        gathered = list(self._given)
        self._barrier.wait(PATIENCE)
        return gathered

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.copy_(torch.stack(self.all_gather(tensor)).sum(0))


def thread_ranks(size: int) -> list[ThreadCollectives]:
    """Return the collectives of ``size`` threads, by rank."""
    given, barrier = [None] * size, threading.Barrier(size)
    return [ThreadCollectives(rank, size, given, barrier) for rank in range(size)]
