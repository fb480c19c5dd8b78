"""Shard of a model on one tensor-parallel rank."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from penstock_enginecore.parallel.collectives import Collectives, SharedMemoryCollectives, TimedCollectives

# Logits whose columns are split among ranks.


class SplitVocabulary:
    """Split of a vocabulary of ``total`` tokens. Rank r has ``width`` tokens, starting at token ``r * width``.

    The last ranks may have fewer tokens or none. Their remaining columns are padding. Not thread-safe.
    """

    def __init__(self, collectives: Collectives, total: int, width: int) -> None:
        self.total, self.width = total, width
        self._collectives = collectives
        self._apart = False

    @property
    def first(self) -> int:
        """First token of this rank."""
        return self._collectives.rank * self.width

    @property
    def own(self) -> int:
        """Number of this rank's columns that are tokens, not padding."""
        return min(max(self.total - self.first, 0), self.width)

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Make ``finish`` return logits ungathered inside the ``with`` block. All ranks must enter such a block
        together.
        """
        self._apart = True
        try:
            yield
        finally:
            self._apart = False

    def finish(self, logits: torch.Tensor) -> torch.Tensor:
        """Gather the output of the ranks' heads, ``[..., width]``, to ``[..., total]``. Inside ``apart``, return it
        unchanged.
        """
        return logits if self._apart else self.whole(logits)

    def is_apart(self, logits: torch.Tensor) -> bool:
        """Return whether the logits are only the columns of this rank."""
        return logits.shape[-1] == self.width

    def whole(self, logits: torch.Tensor) -> torch.Tensor:
        """Gather logits ``[..., width]`` of all ranks to ``[..., total]``. The result is the same on all ranks."""
        return torch.cat(self._collectives.all_gather(logits.contiguous()), dim=-1)[..., : self.total].contiguous()

    def likeliest(self, peaks: torch.Tensor, columns: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the largest value over all ranks and its token, for each row: float32 and int64 ``[rows]``.

        If several tokens have the largest value, the first token is returned. A NaN counts as larger than any number.
        ``peaks`` and ``columns`` are the largest values of this rank's logits and their columns, ``[rows]``.
        """
        both = torch.stack([peaks.double(), columns.double() + self.first])
        values, tokens = torch.stack(self._collectives.all_gather(both)).unbind(1)
        order = torch.where(values.isnan(), torch.inf, values)
        # argmax does not define which of several equal values it returns.
        chosen = torch.where(order == order.amax(dim=0), tokens, torch.inf).argmin(dim=0, keepdim=True)
        return values.gather(0, chosen)[0].float(), tokens.gather(0, chosen)[0].long()


@dataclass(frozen=True, slots=True)
class Part:
    """Shard of a model on one rank.

    Attributes:
        collectives: Collectives that sum the ranks' results.
        vocabulary: Split of the logits if they may stay split among ranks, or None if the model gathers them.
    """

    collectives: TimedCollectives
    vocabulary: SplitVocabulary | None

    def agree(self, ok: bool) -> bool:
        """Return whether ``ok`` is true on all ranks. All ranks must call this."""
        return all(bool(each) for each in self.collectives.all_gather(torch.tensor([ok])))

    @property
    def shared_memory(self) -> SharedMemoryCollectives | None:
        """Shared memory in which kernels may exchange data directly, or None."""
        inner = self.collectives.inner
        return inner if isinstance(inner, SharedMemoryCollectives) else None
