"""The memory of a KV cache."""

from collections.abc import Mapping

import torch

from penstock_enginecore.attention.base import KVCache
from penstock_enginecore.core.kv_cache.grouping import KVTensorWidth, kv_tensor_widths
from penstock_enginecore.core.kv_cache.spec import KVCacheConfig, KVCacheSpec
from penstock_enginecore.models.attention_hook import LayerCache, LayerCaches


class KVMemory:
    """Allocates the pool of one model. ``specs``: by the name of the attention module in ``model``."""

    def __init__(
        self, model: torch.nn.Module, specs: Mapping[str, KVCacheSpec], dtype: torch.dtype, device: torch.device
    ) -> None:
        modules = dict(model.named_modules())
        self._specs = dict(specs)
        self._modules = {name: modules[name] for name in specs}
        self._dtype = dtype
        self._device = device

    def allocate(self, config: KVCacheConfig) -> LayerCaches:
        """The pool. Layer i of every group lives in plane i. A model without layers that attend over a cache has none."""
        if not self._specs:
            return {}
        num_slots = config.num_blocks * config.block_size
        widths = kv_tensor_widths(self._specs, config.groups)
        planes = [self._plane(width, config.block_size, num_slots) for width in widths]
        places = {name: (i, g) for g, group in enumerate(config.groups) for i, name in enumerate(group.layer_names)}
        return {
            self._modules[name]: LayerCache(_view(spec, *planes[places[name][0]]), group=places[name][1])
            for name, spec in self._specs.items()
        }

    def throwaway(self, block_size: int, num_blocks: int) -> LayerCaches:
        """A cache of one group, each layer with memory of its own."""
        return {
            self._modules[name]: LayerCache(
                _view(spec, *self._plane(spec, block_size, num_blocks * block_size)), group=0
            )
            for name, spec in self._specs.items()
        }

    def _plane(
        self, width: KVTensorWidth | KVCacheSpec, block_size: int, num_slots: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys ``[num_slots, key_width]`` and values ``[num_slots, value_width]``. Only the null block is cleared: attention
        reads no slot that its request has not written.
        """
        keys, values = (
            torch.empty(num_slots, numbers, dtype=self._dtype, device=self._device)
            for numbers in (width.key_width, width.value_width)
        )
        keys[:block_size] = 0
        values[:block_size] = 0
        return keys, values


def num_bytes(layers: LayerCaches) -> int:
    """Bytes of a pool; memory that layers share counts once."""
    tensors = [tensor for layer in layers.values() for tensor in (layer.cache.keys, layer.cache.values)]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


def _view(spec: KVCacheSpec, keys: torch.Tensor, values: torch.Tensor) -> KVCache:
    """A layer's view of its plane, which may be wider than the layer."""
    return KVCache(keys[:, : spec.key_width], values[:, : spec.value_width], spec.num_kv_heads)
