"""What ranks of a data-parallel group exchange."""

from collections.abc import Sequence
from typing import Protocol

import torch

from penstock_enginecore.core.collective_errors import CollectiveBroken

__all__ = ["CollectiveBroken", "GroupCollectives"]


class GroupCollectives(Protocol):
    """All ranks call the same methods in the same order, each from one thread at a time. Tensors are on the CPU.

    Each method raises CollectiveBroken at once, and every time after that, when ``abort`` is called, here or by another rank, or
    another rank has died. One that has left with ``close`` breaks only what still needs it, so that a collective whose end made a
    rank leave ends well everywhere. A rank that hangs breaks nothing: the others wait until ``abort``.
    """

    rank: int
    size: int
    entered: int
    """Collectives that this rank has begun, whether or not they ended."""

    def exchange(self, row: bytes) -> list[bytes]:
        """The rows of all ranks, which are of one length, by rank."""

    def all_gather_rows(self, tensor: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        """The rows of all ranks behind one another, ``[sum(counts), ...]``. ``tensor``: ``[counts[rank], ...]``, everywhere of
        one dtype and width. ``counts`` are the same on all ranks.
        """

    def all_to_all_rows(
        self, tensor: torch.Tensor, send_counts: Sequence[int], receive_counts: Sequence[int]
    ) -> torch.Tensor:
        """What the ranks have for this one, by rank, ``[sum(receive_counts), ...]``. ``tensor``: ``[sum(send_counts), ...]``,
        what this one has for each. What a rank sends to another is what that receives from it.
        """

    def abort(self) -> None:
        """End the collective that another thread is in, and all later ones. Waits for nothing. Any thread may call it."""

    def close(self) -> None:
        """Leave, and give back what the group holds. This rank is in no collective: ``abort`` ends one."""
