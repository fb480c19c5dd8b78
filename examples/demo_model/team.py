"""Worker processes that train together. Each worker has one thread and its own rows; workers sum up gradients.

For such small matrices, several processes with one thread each are faster than one process with several
threads. Several processes also slow down less when other programs use the same cores.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Team:
    """Team of workers from the view of one worker: its number, and the number of workers."""

    rank: int
    size: int

    def add_up(self, tensors: list[Tensor]) -> None:
        """Replace every tensor by its sum over the workers, in one exchange."""
        if self.size == 1:
            return
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        dist.all_reduce(flat)
        totals = flat.split_with_sizes([tensor.numel() for tensor in tensors])
        for tensor, total in zip(tensors, totals, strict=True):
            tensor.copy_(total.view_as(tensor))


def join_team(rank: int, size: int, meeting: str) -> Team:
    """Set this worker to one thread, and connect it to the other workers through the file ``meeting``."""
    torch.set_num_threads(1)
    if size > 1:
        dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=size)
    return Team(rank, size)


def leave_team(team: Team) -> None:
    """Close the connection to the other workers."""
    if team.size > 1:
        dist.destroy_process_group()
