"""How long the ranks' exchanges take."""

import time
from collections.abc import Iterable

import torch

from penstock_common.observability.histogram import BucketCounts, Buckets
from penstock_enginecore.parallel.collectives import Collectives

_SECONDS = (1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2, 5e-2, 0.25, 1.0)


class TimedCollectives:
    """``Collectives``, ``inner``, that keep the seconds of each operation: those of waiting for the other ranks among them."""

    def __init__(self, inner: Collectives) -> None:
        self.rank, self.size = inner.rank, inner.size
        self.inner = inner
        self._all_reduce, self._all_gather = Buckets(_SECONDS), Buckets(_SECONDS)

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        began = time.perf_counter()
        reduced = self.inner.all_reduce(tensor)
        self._all_reduce.observe(time.perf_counter() - began)
        return reduced

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        began = time.perf_counter()
        gathered = self.inner.all_gather(tensor)
        self._all_gather.observe(time.perf_counter() - began)
        return gathered

    def have_reduced(self, seconds: Iterable[float]) -> None:
        """Sums of the same ranks that kernels have made, without this object."""
        for each in seconds:
            self._all_reduce.observe(each)

    def times(self) -> dict[str, BucketCounts]:
        """Seconds by operation. Any thread may ask."""
        return {"all_reduce": self._all_reduce.counts(), "all_gather": self._all_gather.counts()}
