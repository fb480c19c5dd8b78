"""The attention layers of a drafter among those of the model: the same block tables, memory of their own."""

from collections.abc import Callable, Mapping
from typing import Protocol

import msgspec

from penstock_enginecore.attention.kv_cache import LayerCaches
from penstock_enginecore.attention.kv_memory import KVMemory, num_groups
from penstock_enginecore.core.kv_cache.spec import DRAFT_PREFIX, KVCacheConfig, KVCacheSpec


def model_layers(config: KVCacheConfig) -> KVCacheConfig:
    """The groups with the layers of the model alone; one may have none left."""
    return _with(config, lambda name: None if name.startswith(DRAFT_PREFIX) else name)


def draft_layers(config: KVCacheConfig) -> KVCacheConfig:
    """The groups with the layers of the drafter alone, by the names that these have themselves; one may have none."""
    return _with(config, lambda name: name.removeprefix(DRAFT_PREFIX) if name.startswith(DRAFT_PREFIX) else None)


def _with(config: KVCacheConfig, name_of: Callable[[str], str | None]) -> KVCacheConfig:
    groups = [
        msgspec.structs.replace(
            group, layer_names=tuple(own for name in group.layer_names if (own := name_of(name)) is not None)
        )
        for group in config.groups
    ]
    return msgspec.structs.replace(config, groups=tuple(groups))


class Layers(Protocol):
    """What runs a drafter's layers; see ``ForwardPass``."""

    @property
    def specs(self) -> Mapping[str, KVCacheSpec]:
        """By the layers' own names."""

    @property
    def memory(self) -> KVMemory:
        """Allocates caches for ``bind``."""

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights."""

    def bind(self, caches: LayerCaches) -> None:
        """Run on this KV cache from now on."""


class WithLayers:
    """The part of a ``Drafter`` that concerns its weights and the keys and values of its layers, which ``layers`` runs.
    ``num_groups``: of the KV cache, up to the last that has some of them.
    """

    def __init__(self, layers: Layers) -> None:
        self._layers = layers
        self.caches: LayerCaches = {}
        self.num_groups = 0

    @property
    def specs(self) -> Mapping[str, KVCacheSpec]:
        """Its layers, behind the prefix that tells them from the model's."""
        return {DRAFT_PREFIX + name: spec for name, spec in self._layers.specs.items()}

    @property
    def weight_bytes(self) -> int:
        """Those of what runs them."""
        return self._layers.weight_bytes

    def allocate(self, config: KVCacheConfig) -> None:
        """Keys and values of its own layers."""
        caches = self._layers.memory.allocate(draft_layers(config))
        for layer in caches.values():
            if (
                layer.cache.keys.device.type != "cpu"
            ):  # a host's fresh memory is zeros; what nobody computed may be attended over
                layer.cache.keys.zero_()
                layer.cache.values.zero_()
        self._layers.bind(caches)
        self.caches = {DRAFT_PREFIX + name: layer for name, layer in caches.items()}
        self.num_groups = num_groups(caches)

    def release(self) -> None:
        """Let go of them."""
        self._layers.bind({})
        self.caches = {}
