"""Adapters of a model that the CPU kernels' decoder computes."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from penstock_enginecore.attention.base import IntArray
from penstock_enginecore.forward.native_models import is_gated, own_layers, query_key_value
from penstock_enginecore.lora.adapter import LoraAdapter, LoraSegment, LowRankUpdate, TakeAdapter
from penstock_enginecore.lora.reference import AdaptedModules, expect_features, expect_known
from penstock_enginecore.native.ffi_structs import Segment
from penstock_enginecore.native.library import NativeLibrary
from penstock_enginecore.native.low_rank import MergedUpdate, PackedUpdates


@dataclass(frozen=True, slots=True)
class _Place:
    """Linear layers by name, whose weights are one product of the decoder's; none for a product that it leaves out."""

    layers: dict[str, torch.nn.Linear]
    interleaved: bool = False

    def take(self, updates: dict[str, LowRankUpdate]) -> MergedUpdate | None:
        """Those of its layers, out of ``updates``. Raises ValueError for one of other features."""
        own = [updates.pop(name, None) for name in self.layers]
        features = []
        for (name, layer), update in zip(self.layers.items(), own, strict=True):
            features.append(layer.out_features)
            if update is not None:
                expect_features(name, update, layer.out_features, layer.in_features)
        if not any(own):
            return None
        if self.interleaved and len(own) == 1 and own[0] is not None:
            return MergedUpdate.halves(own[0])
        return MergedUpdate.of(own, features, interleaved=self.interleaved)


class DecoderAdapters:
    """Those of ``module``, by digest: packed for its products in the decoder, and on modules that compute beside it."""

    def __init__(self, library: NativeLibrary, module: PreTrainedModel) -> None:
        self._library = library
        self._places = list(_places(module))
        self._packed: dict[bytes, PackedUpdates] = {}
        self._beside = AdaptedModules(module)

    def prepare(self, adapter: LoraAdapter) -> TakeAdapter:
        """On any thread. Raises ValueError, see ``AdaptedForward``."""
        left = dict(adapter.updates)
        packed = PackedUpdates(self._library, [place.take(left) for place in self._places])
        take_beside = self._beside.prepare(LoraAdapter(adapter.digest, left))

        def take() -> None:
            take_beside()
            self._packed[adapter.digest] = packed

        return take

    def remove(self, digest: bytes) -> None:
        """KeyError where it is not there."""
        del self._packed[digest]
        self._beside.remove(digest)

    def structs(self, segments: Sequence[LoraSegment]) -> Any:
        """An array of them as the decoder takes it. Raises LookupError for an adapter that is not there."""
        expect_known(segments, self._packed)
        return (Segment * len(segments))(
            *(self._packed[each.digest].segment(each.first, each.end) for each in segments)
        )

    def beside(self, segments: Sequence[LoraSegment], rows: IntArray) -> Any:
        """A ``with`` block in which modules get rows with ``segments``."""
        return self._beside.step(segments, rows)


def _places(module: Any) -> Iterator[_Place]:
    """In the decoder's order: queries, keys and values, output, gate and up, down of each layer, then the head."""
    names = {id(each): name for name, each in module.named_modules()}

    def place(*layers: Any, interleaved: bool = False) -> _Place:
        return _Place({names[id(layer)]: layer for layer in layers}, interleaved)

    for layer in own_layers(module.model):
        attention, mlp = layer.self_attn, layer.mlp
        yield place(*query_key_value(attention))
        yield place(attention.o_proj)
        if is_gated(mlp):
            fused = hasattr(mlp, "gate_up_proj")
            yield place(*([mlp.gate_up_proj] if fused else [mlp.gate_proj, mlp.up_proj]), interleaved=True)
            yield place(mlp.down_proj)
        else:
            yield _Place({})
            yield _Place({})
    # Stages that are not the last have none.
    yield place(module.lm_head) if isinstance(module.lm_head, torch.nn.Linear) else _Place({})
