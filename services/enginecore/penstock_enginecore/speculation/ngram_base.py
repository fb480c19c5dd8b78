"""What drafters that look tokens up have not: weights, and keys and values."""

from collections.abc import Mapping

import torch

from penstock_enginecore.attention.kv_cache import LayerCaches
from penstock_enginecore.core.kv_cache.spec import KVCacheConfig, KVCacheSpec
from penstock_enginecore.speculation.base import Stateless


class Weightless(Stateless):
    """The part of a ``Drafter`` that concerns a device."""

    specs: Mapping[str, KVCacheSpec] = {}
    caches: LayerCaches = {}
    weight_bytes = 0

    def allocate(self, config: KVCacheConfig) -> None:
        """There is no cache."""

    def release(self) -> None:
        """There is no cache."""

    def to(self, device: torch.device) -> None:
        """There is nothing to move."""
