"""What one rank has of a model that several share."""

from dataclasses import dataclass

import torch

from penstock_enginecore.parallel.shared_memory import SharedMemoryCollectives
from penstock_enginecore.parallel.timed_collectives import TimedCollectives
from penstock_enginecore.parallel.vocabulary import SplitVocabulary


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
