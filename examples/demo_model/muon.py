"""A small float32 Muon optimizer for weight matrices (momentum, then orthogonalised updates).

A model this small trains for only a few million tokens. With so few tokens, orthogonalised updates reach a much lower
loss than Adam. Embeddings and norms are still trained with Adam.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
from team import Team
from torch import Tensor

# Coefficients of a quintic polynomial that moves every singular value in (0, 1] towards 1 within a few rounds.
QUINTIC = (3.4445, -4.7750, 2.0315)


def orthogonalise(matrices: Tensor, rounds: int = 5) -> Tensor:
    """Return a stack of matrices with all singular values moved close to 1 (Newton-Schulz iteration)."""
    a, b, c = QUINTIC
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(rounds):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    result: Tensor = x.mT if tall else x
    return result


class Muon:
    """Muon optimizer for a fixed set of matrices. The workers of a team divide the work of each step."""

    def __init__(self, matrices: Iterable[Tensor], team: Team, momentum: float = 0.95, decay: float = 0.01) -> None:
        """Store the matrices, and create momentum for the matrices that this worker updates, stacked by shape."""
        self.matrices = list(matrices)
        self.team = team
        self.momentum = momentum
        self.decay = decay
        by_shape: dict[torch.Size, list[int]] = defaultdict(list)
        for index, matrix in enumerate(self.matrices):
            by_shape[matrix.shape].append(index)
        shares = (indices[team.rank :: team.size] for indices in by_shape.values())
        self.shares = [share for share in shares if share]
        self.buffers = [torch.zeros((len(share), *self.matrices[share[0]].shape)) for share in self.shares]

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """Update every matrix with learning rate ``rate``."""
        changes = [torch.zeros_like(matrix) for matrix in self.matrices]
        for share, buffer in zip(self.shares, self.buffers, strict=True):
            gradient = torch.stack([grad for index in share if (grad := self.matrices[index].grad) is not None])
            buffer.lerp_(gradient, 1 - self.momentum)
            update = orthogonalise(gradient.lerp(buffer, self.momentum))
            scale = max(1.0, update.shape[-2] / update.shape[-1]) ** 0.5
            for index, change in zip(share, update, strict=True):
                changes[index] = change * scale
        self.team.add_up(changes)
        for matrix, change in zip(self.matrices, changes, strict=True):
            matrix.mul_(1 - rate * self.decay).add_(change, alpha=-rate)
