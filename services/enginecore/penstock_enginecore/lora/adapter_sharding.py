"""What a worker keeps of an adapter where several workers share the model."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F  # noqa: N812

from penstock_enginecore.lora.adapter import LoraAdapter, LowRankUpdate


@dataclass(frozen=True, slots=True)
class OwnFeatures:
    """What a rank has of a linear layer: the ``outputs``, which are zeros behind the layer's last, or the ``inputs``, over which
    the ranks' outputs are summed. None for all of them.
    """

    outputs: range | None = None
    inputs: range | None = None

    def of(self, update: LowRankUpdate) -> LowRankUpdate:
        """The rows of B that give these outputs, or the columns of A that take these inputs, in memory of their own."""
        a, b = update.a, update.b
        if self.inputs is not None:
            a = a[:, self.inputs.start : self.inputs.stop]
        if self.outputs is not None:
            b = b[self.outputs.start : self.outputs.stop]
            b = F.pad(b, (0, 0, 0, len(self.outputs) - len(b)))
        return LowRankUpdate(_copy(a), _copy(b))


@dataclass(frozen=True, slots=True)
class AdapterPart:
    """``features``: of the layers that are split among ranks, by name. ``linears``: names of the layers that the worker's stage
    has, None for all.
    """

    features: Mapping[str, OwnFeatures] = field(default_factory=dict)
    linears: frozenset[str] | None = None

    def of(self, adapter: LoraAdapter) -> LoraAdapter:
        """``adapter`` with what the worker computes of it, under the digest of the whole. It keeps none of the whole's memory,
        unless it is the whole; it may be empty.
        """
        if not self.features and self.linears is None:
            return adapter
        whole = OwnFeatures()
        own = {
            name: self.features.get(name, whole).of(update)
            for name, update in adapter.updates.items()
            if self.linears is None or name in self.linears
        }
        return LoraAdapter(adapter.digest, own)


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone(memory_format=torch.contiguous_format)
