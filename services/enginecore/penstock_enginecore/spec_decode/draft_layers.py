"""The attention layers of a drafter among those of the model: the same block tables, memory of their own."""

from collections.abc import Callable

import msgspec

from penstock_enginecore.core.kv_cache.spec import KVCacheConfig

PREFIX = "draft."
"""What the names of a drafter's layers begin with."""


def model_layers(config: KVCacheConfig) -> KVCacheConfig:
    """The groups with the layers of the model alone; one may have none left."""
    return _with(config, lambda name: None if name.startswith(PREFIX) else name)


def draft_layers(config: KVCacheConfig) -> KVCacheConfig:
    """The groups with the layers of the drafter alone, by the names that these have themselves; one may have none."""
    return _with(config, lambda name: name.removeprefix(PREFIX) if name.startswith(PREFIX) else None)


def _with(config: KVCacheConfig, name_of: Callable[[str], str | None]) -> KVCacheConfig:
    groups = [
        msgspec.structs.replace(
            group, layer_names=tuple(own for name in group.layer_names if (own := name_of(name)) is not None)
        )
        for group in config.groups
    ]
    return msgspec.structs.replace(config, groups=tuple(groups))
