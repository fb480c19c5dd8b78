"""The modules of a base model that adapters may update."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Self, cast

import torch
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from penstock_enginecore.lora.errors import LoraReason
from penstock_enginecore.models.quantization.layers import QuantizedLinear
from penstock_enginecore.models.relative_attention import DistanceLinear
from penstock_enginecore.models.state_hook import ReadLinear

_OF_EXPERTS = "an expert or another part of a mixture of experts"
_COMPARED_ROWS = 64
_ROUNDING = 2.0**-8
"""Maximum relative difference between two numbers that count as copies of the same number, if one was rounded to 16
bits.
"""


@dataclass(frozen=True, slots=True)
class Unserved:
    """Module that adapters may name but not update, with the reason and a description of the module.

    Attributes:
        linear: Whether "all-linear" also selects the module.
    """

    reason: LoraReason
    what: str
    linear: bool = False


@dataclass(frozen=True, slots=True)
class BaseSample:
    """Sample of a base model weight of which adapters may contain a copy: the weight's shape, and some rows as float32."""

    shape: tuple[int, ...]
    indices: torch.Tensor
    rows: torch.Tensor

    @classmethod
    def of(cls, weight: torch.Tensor) -> Self:
        """Return a sample of a weight: rows at equal distances, including the first and the last row."""
        count = min(_COMPARED_ROWS, len(weight))
        indices = torch.linspace(0, len(weight) - 1, count, device=weight.device).long()
        rows = weight.detach()[indices].to("cpu", torch.float32, copy=True)
        return cls(tuple(weight.shape), indices.cpu(), rows)

    def agrees(self, copy: torch.Tensor) -> bool:
        """Return whether ``copy``, which has the shape of the sampled weight, has the same sampled rows up to
        rounding.
        """
        return torch.allclose(copy[self.indices].float(), self.rows, rtol=_ROUNDING, atol=1e-6)


@dataclass(frozen=True, slots=True)
class AdapterTarget:
    """The modules of a model that adapters may update.

    Attributes:
        model: Name or path from which the model was loaded.
        linears: ``(out, in)`` features of the model's linear layers by name, including an lm_head.
        unserved: Other modules that adapters may name, but for which updates are not supported.
        heads: Names of the layers that compute logits or scores. PEFT's "all-linear" does not select these layers.
        prefix: Name prefix of this model inside a transformers model with a head, such as ``model``.
        samples: Samples of weights of which adapters may contain copies, by parameter name.
    """

    model: str
    linears: Mapping[str, tuple[int, int]]
    unserved: Mapping[str, Unserved] = field(default_factory=dict)
    heads: frozenset[str] = frozenset()
    prefix: str = ""
    samples: Mapping[str, BaseSample] = field(default_factory=dict)

    @property
    def all_linear(self) -> frozenset[str]:
        """Names of the layers that PEFT's "all-linear" selects."""
        return frozenset({*self.linears, *(name for name, why in self.unserved.items() if why.linear)} - self.heads)

    @classmethod
    def of(cls, module: PreTrainedModel) -> Self:
        """Return the target for a transformers model whose linear layers are neither packed nor split among ranks.

        Weights on the meta device are allowed. Adapters may not contain copies of such weights.
        """
        named = dict(module.named_modules())
        blocks = _expert_blocks(named)
        linears: dict[str, tuple[int, int]] = {}
        unserved: dict[str, Unserved] = {}
        for name, child in named.items():
            if any(f"{name}.".startswith(f"{block}.") for block in blocks):
                if next(child.parameters(recurse=False), None) is not None:
                    unserved[name] = Unserved(LoraReason.EXPERTS, _OF_EXPERTS, isinstance(child, torch.nn.Linear))
            elif _is_linear(child):
                linears[name] = (child.out_features, child.in_features)
            elif why := _unserved(child):
                unserved[name] = why
        return cls(
            model=str(getattr(module, "name_or_path", "") or ""),
            linears=linears,
            unserved=unserved,
            heads=frozenset(_heads(module, named)),
            prefix=str(module.base_model_prefix or ""),
            samples=dict(_samples(module, named)),
        )


def _is_linear(module: Any) -> bool:
    """Return whether the module is exactly a linear layer. A subclass of a linear layer may compute something else."""
    if isinstance(module, QuantizedLinear):
        return True
    return isinstance(module, torch.nn.Linear) and type(module).forward is torch.nn.Linear.forward


def _unserved(module: torch.nn.Module) -> Unserved | None:
    if isinstance(module, DistanceLinear):
        return Unserved(LoraReason.MODULE, "a layer that also computes distances, which all prompts share", linear=True)
    if isinstance(module, ReadLinear):
        return Unserved(LoraReason.MODULE, "a layer whose weight is used without calling the layer", linear=True)
    if isinstance(module, Conv1D):
        return Unserved(LoraReason.CONV1D, "transformers' Conv1D", linear=True)
    if isinstance(module, torch.nn.Embedding):
        return Unserved(LoraReason.EMBEDDING, "an embedding")
    if isinstance(module, torch.nn.Linear | torch.nn.modules.conv._ConvNd | torch.nn.MultiheadAttention):
        return Unserved(LoraReason.MODULE, f"a {type(module).__name__}", isinstance(module, torch.nn.Linear))
    return None


def _expert_blocks(named: Mapping[str, torch.nn.Module]) -> list[str]:
    """Return the names of mixture-of-experts blocks. A block contains experts, a router, and possibly shared experts.

    If a layer has experts beside its attention and its MLP, as in Gemma 4, experts and router are separate blocks.
    """
    blocks = []
    for name, module in named.items():
        parent, _, own = name.rpartition(".")
        has_weights = isinstance(module, torch.nn.ModuleList) or any(True for _ in module.parameters(recurse=False))
        if parent and ("Expert" in type(module).__name__ or (own == "experts" and has_weights)):
            blocks += [name, f"{parent}.router"] if f"{parent}.self_attn" in named else [parent]
    return list(dict.fromkeys(blocks))


def _heads(module: PreTrainedModel, named: Mapping[str, torch.nn.Module]) -> Iterator[str]:
    """Yield the names of the output head's modules, found by the same rules as in PEFT."""
    head = _output_layer(module)
    if head is None:
        yield from [name for name in ("score", "classifier") if name in named][:1]
    else:
        yield next(name for name, child in named.items() if child is head)


def _output_layer(module: Any) -> torch.nn.Module | None:
    return cast("torch.nn.Module | None", module.get_output_embeddings())


def _samples(module: PreTrainedModel, named: Mapping[str, torch.nn.Module]) -> Iterator[tuple[str, BaseSample]]:
    """Yield samples of the weights that PEFT saves together with an adapter for an lm_head."""
    for layer in (module.get_input_embeddings(), _output_layer(module)):
        if not isinstance(layer, torch.nn.Linear | torch.nn.Embedding):
            continue
        name = next(name for name, child in named.items() if child is layer)
        for own, parameter in layer.named_parameters(recurse=False):
            if not parameter.is_meta:
                yield f"{name}.{own}", BaseSample.of(parameter)
