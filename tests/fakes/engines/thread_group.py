"""``GroupCollectives`` of ranks that are threads of the test."""

import threading
from collections.abc import Sequence
from typing import Any

import torch

from penstock_enginecore.core.collective_errors import CollectiveBroken
from tests.fakes.patience import PATIENCE


class _Mailbox:
    """Messages sent by ranks, by number of the collective, sender and receiver, and the ranks that have left."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.sent: dict[tuple[int, int, int], tuple[str, Any]] = {}
        self.broken = False
        self.left: set[int] = set()


class ThreadGroup:
    """A rank. It detects immediately if another rank gives up or closes, and if ranks are in different collectives."""

    def __init__(self, rank: int, size: int, mailbox: _Mailbox) -> None:
        self.rank, self.size = rank, size
        self.entered = 0
        self._mailbox = mailbox

    def exchange(self, row: bytes) -> list[bytes]:
        return self._move("exchange", [row] * self.size)

    def all_gather_rows(self, tensor: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        assert len(tensor) == counts[self.rank]
        gathered = self._move("all-gather", [tensor.clone()] * self.size)
        assert [len(each) for each in gathered] == list(counts)
        return torch.cat(gathered)

    def all_to_all_rows(
        self, tensor: torch.Tensor, send_counts: Sequence[int], receive_counts: Sequence[int]
    ) -> torch.Tensor:
        received = self._move("all-to-all", list(tensor.clone().split(list(send_counts))))
        assert [len(each) for each in received] == list(receive_counts)
        return torch.cat(received)

    def abort(self) -> None:
        with self._mailbox.changed:
            self._mailbox.broken = True
            self._mailbox.changed.notify_all()

    def close(self) -> None:
        with self._mailbox.changed:
            self._mailbox.left.add(self.rank)
            self._mailbox.changed.notify_all()

    def _move(self, kind: str, outgoing: list[Any]) -> list[Any]:
        box = self._mailbox
        self.entered += 1
        with box.changed:
            for peer, each in enumerate(outgoing):
                box.sent[self.entered, self.rank, peer] = kind, each
            box.changed.notify_all()
            return [self._receive(kind, peer) for peer in range(self.size)]

    def _receive(self, kind: str, peer: int) -> Any:
        box, key = self._mailbox, (self.entered, peer, self.rank)
        arrived = box.changed.wait_for(
            lambda: box.broken or key in box.sent or not box.left.isdisjoint({self.rank, peer}), PATIENCE
        )
        assert arrived, f"rank {self.rank} waits for rank {peer} in {kind} {self.entered}"
        if box.broken or self.rank in box.left or key not in box.sent:
            raise CollectiveBroken(f"rank {peer} or another has given up")
        found, value = box.sent.pop(key)
        if found != kind:
            raise CollectiveBroken(f"rank {peer} is in {found} {self.entered}, this rank in {kind}")
        return value


def thread_group(size: int) -> list[ThreadGroup]:
    """Return the groups of ``size`` threads, by rank."""
    mailbox = _Mailbox()
    return [ThreadGroup(rank, size, mailbox) for rank in range(size)]
