"""Description of the shard of a model on one tensor-parallel rank."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from penstock_enginecore.parallel.collectives import Collectives, SharedMemoryCollectives, TimedCollectives

# Logits whose columns are computed by different ranks.


class SplitVocabulary:
    """Split among ranks of a vocabulary with ``total`` tokens. Rank r computes ``width`` columns of logits, starting
    with the column of token ID ``r * width``.

    The last ranks may have fewer tokens or none, so some of their columns are padding. Not thread-safe.
    """

    def __init__(self, collectives: Collectives, total: int, width: int) -> None:
        self.total, self.width = total, width
        self._collectives = collectives
        self._apart = False

    @property
    def first(self) -> int:
        """ID of the token that belongs to this rank's first column of logits."""
        return self._collectives.rank * self.width

    @property
    def own(self) -> int:
        """Number of this rank's columns of logits that belong to tokens, without padding."""
        return min(max(self.total - self.first, 0), self.width)

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Make ``finish`` return only this rank's columns inside the ``with`` block. All ranks must enter such a block
        at the same point.
        """
        self._apart = True
        try:
            yield
        finally:
            self._apart = False

    def finish(self, logits: torch.Tensor) -> torch.Tensor:
        """Gather the columns of all ranks, ``[..., width]``, and return complete logits ``[..., total]``. Inside
        ``apart``, return ``logits`` unchanged.
        """
        return logits if self._apart else self.whole(logits)

    def is_apart(self, logits: torch.Tensor) -> bool:
        """Return whether ``logits`` has only the columns of this rank."""
        return logits.shape[-1] == self.width

    def whole(self, logits: torch.Tensor) -> torch.Tensor:
        """Gather the columns of all ranks, ``[..., width]``, and return complete logits ``[..., total]``. The result is
        the same on all ranks.
        """
        return torch.cat(self._collectives.all_gather(logits.contiguous()), dim=-1)[..., : self.total].contiguous()

    def likeliest(self, peaks: torch.Tensor, columns: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return, for each row, the largest logit over all ranks and the ID of its token: float32 and int64 ``[rows]``.

        If several tokens have the largest logit, the first token is returned. A NaN counts as larger than any number.
        ``peaks`` and ``columns``, both ``[rows]``, are the largest logit of this rank in each row, and the column of
        this logit.
        """
        both = torch.stack([peaks.double(), columns.double() + self.first])
        values, tokens = torch.stack(self._collectives.all_gather(both)).unbind(1)
        order = torch.where(values.isnan(), torch.inf, values)
        # It is undefined which of several equal values argmax returns.
        chosen = torch.where(order == order.amax(dim=0), tokens, torch.inf).argmin(dim=0, keepdim=True)
        return values.gather(0, chosen)[0].float(), tokens.gather(0, chosen)[0].long()


@dataclass(frozen=True, slots=True)
class Part:
    """Description of the shard of a model on one tensor-parallel rank.

    Attributes:
        collectives: Collectives that sum the ranks' results.
        vocabulary: Split of the logits among ranks, or None if the model itself gathers complete logits.
    """

    collectives: TimedCollectives
    vocabulary: SplitVocabulary | None

    def agree(self, ok: bool) -> bool:
        """Return whether ``ok`` is true on all ranks. All ranks must call this method."""
        return all(bool(each) for each in self.collectives.all_gather(torch.tensor([ok])))

    @property
    def shared_memory(self) -> SharedMemoryCollectives | None:
        """Shared memory in which the kernels of different ranks may exchange data directly, or None."""
        inner = self.collectives.inner
        return inner if isinstance(inner, SharedMemoryCollectives) else None
