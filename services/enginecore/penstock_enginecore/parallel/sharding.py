"""What one rank has of a model that several share."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from penstock_enginecore.parallel.collectives import Collectives, SharedMemoryCollectives, TimedCollectives

# What one rank has of a model that several share.

# Logits of which every rank has some columns.


class SplitVocabulary:
    """``total`` tokens, of which rank r has the ``width`` from ``r * width`` on: the last ranks fewer, or none, with columns
    behind them that mean nothing. Not for use by several threads at once.
    """

    def __init__(self, collectives: Collectives, total: int, width: int) -> None:
        self.total, self.width = total, width
        self._collectives = collectives
        self._apart = False

    @property
    def first(self) -> int:
        """The first token of this rank."""
        return self._collectives.rank * self.width

    @property
    def own(self) -> int:
        """How many of its columns are tokens."""
        return min(max(self.total - self.first, 0), self.width)

    @contextmanager
    def apart(self) -> Iterator[None]:
        """In the ``with`` block ``finish`` leaves logits as they are. All ranks do the same."""
        self._apart = True
        try:
            yield
        finally:
            self._apart = False

    def finish(self, logits: torch.Tensor) -> torch.Tensor:
        """What a head of this rank gives, ``[..., width]``, made whole, ``[..., total]``, unless the block says otherwise."""
        return logits if self._apart else self.whole(logits)

    def is_apart(self, logits: torch.Tensor) -> bool:
        """Whether these are the columns of this rank alone."""
        return logits.shape[-1] == self.width

    def whole(self, logits: torch.Tensor) -> torch.Tensor:
        """``[..., total]`` of ``[..., width]``, the same on all ranks."""
        return torch.cat(self._collectives.all_gather(logits.contiguous()), dim=-1)[..., : self.total].contiguous()

    def likeliest(self, peaks: torch.Tensor, columns: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Of the largest value of each row of this rank's logits and its column, ``[rows]`` each, the largest of all ranks: value
        float32 and token int64 ``[rows]``. The first token of several; a NaN is larger than any number.
        """
        both = torch.stack([peaks.double(), columns.double() + self.first])
        values, tokens = torch.stack(self._collectives.all_gather(both)).unbind(1)
        order = torch.where(values.isnan(), torch.inf, values)
        # argmax promises nothing of which of equal values it finds
        chosen = torch.where(order == order.amax(dim=0), tokens, torch.inf).argmin(dim=0, keepdim=True)
        return values.gather(0, chosen)[0].float(), tokens.gather(0, chosen)[0].long()


@dataclass(frozen=True, slots=True)
class Part:
    """``collectives``: what makes the ranks' sums whole. ``vocabulary``: of logits that can be left in parts, None where the
    model puts them together.
    """

    collectives: TimedCollectives
    vocabulary: SplitVocabulary | None

    def agree(self, ok: bool) -> bool:
        """Whether it is so on all ranks, which all ask."""
        return all(bool(each) for each in self.collectives.all_gather(torch.tensor([ok])))

    @property
    def shared_memory(self) -> SharedMemoryCollectives | None:
        """What kernels may exchange in by themselves; None where the ranks have none."""
        inner = self.collectives.inner
        return inner if isinstance(inner, SharedMemoryCollectives) else None
