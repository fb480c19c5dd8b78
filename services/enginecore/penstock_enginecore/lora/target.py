"""Which modules of a base model an adapter can have updates for."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Self, cast

import torch
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from penstock_enginecore.lora.errors import LoraReason
from penstock_enginecore.models.quantization.layers import QuantizedLinear

_OF_EXPERTS = "experts or what belongs to them"
_COMPARED_ROWS = 64
_ROUNDING = 2.0**-8
"""How much one of two copies of a number that is stored in 16 bits may differ, as a share of it."""


@dataclass(frozen=True, slots=True)
class Unserved:
    """Why a module takes no update, and what it is, in words. ``linear``: "all-linear" means it, too."""

    reason: LoraReason
    what: str
    linear: bool = False


@dataclass(frozen=True, slots=True)
class BaseSample:
    """A weight of the base model, of which adapters may bring a copy: its shape, and some of its rows as float32."""

    shape: tuple[int, ...]
    indices: torch.Tensor
    rows: torch.Tensor

    @classmethod
    def of(cls, weight: torch.Tensor) -> Self:
        """Rows from the first to the last."""
        count = min(_COMPARED_ROWS, len(weight))
        indices = torch.linspace(0, len(weight) - 1, count, device=weight.device).long()
        rows = weight.detach()[indices].to("cpu", torch.float32, copy=True)
        return cls(tuple(weight.shape), indices.cpu(), rows)

    def agrees(self, copy: torch.Tensor) -> bool:
        """Whether ``copy``, of the same shape, has the same rows but for rounding."""
        return torch.allclose(copy[self.indices].float(), self.rows, rtol=_ROUNDING, atol=1e-6)


@dataclass(frozen=True, slots=True)
class AdapterTarget:
    """What adapters of a model can be. ``model``: the name or path it was loaded from. ``linears``: ``(out, in)`` features of its
    linear layers by name, an lm_head among them. ``unserved``: others that adapters are made for elsewhere. ``heads``: names of
    those that "all-linear" leaves out: the layer that puts out logits, or scores. ``prefix``: under which transformers has this
    model in one with a head, such as ``model``. ``samples``: by parameter.
    """

    model: str
    linears: Mapping[str, tuple[int, int]]
    unserved: Mapping[str, Unserved] = field(default_factory=dict)
    heads: frozenset[str] = frozenset()
    prefix: str = ""
    samples: Mapping[str, BaseSample] = field(default_factory=dict)

    @property
    def all_linear(self) -> frozenset[str]:
        """What "all-linear" means."""
        return frozenset({*self.linears, *(name for name, why in self.unserved.items() if why.linear)} - self.heads)

    @classmethod
    def of(cls, module: PreTrainedModel) -> Self:
        """Of a model of transformers whose linear layers are whole: neither packed nor split among ranks. Weights on the meta
        device do; then no adapter may bring copies of some.
        """
        named = dict(module.named_modules())
        blocks = _expert_blocks(named)
        linears: dict[str, tuple[int, int]] = {}
        unserved: dict[str, Unserved] = {}
        for name, child in named.items():
            if any(name.startswith(f"{block}.") for block in blocks):
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
    """Whether it computes what a linear layer does. Subclasses may do something else."""
    if isinstance(module, QuantizedLinear):
        return True
    return isinstance(module, torch.nn.Linear) and type(module).forward is torch.nn.Linear.forward


def _unserved(module: torch.nn.Module) -> Unserved | None:
    if isinstance(module, Conv1D):
        return Unserved(LoraReason.CONV1D, "transformers' Conv1D", linear=True)
    if isinstance(module, torch.nn.Embedding):
        return Unserved(LoraReason.EMBEDDING, "an embedding")
    if isinstance(module, torch.nn.Linear | torch.nn.modules.conv._ConvNd | torch.nn.MultiheadAttention):
        return Unserved(LoraReason.MODULE, f"a {type(module).__name__}", isinstance(module, torch.nn.Linear))
    return None


def _expert_blocks(named: Mapping[str, torch.nn.Module]) -> list[str]:
    """Names of modules that choose experts: a parent of those has a router, too, and maybe experts that all tokens share."""
    blocks = []
    for name, module in named.items():
        parent, _, own = name.rpartition(".")
        has_weights = isinstance(module, torch.nn.ModuleList) or any(True for _ in module.parameters(recurse=False))
        if parent and ("Expert" in type(module).__name__ or (own == "experts" and has_weights)):
            blocks.append(parent)
    return list(dict.fromkeys(blocks))


def _heads(module: PreTrainedModel, named: Mapping[str, torch.nn.Module]) -> Iterator[str]:
    """As PEFT finds them."""
    head = _output_layer(module)
    if head is None:
        yield from [name for name in ("score", "classifier") if name in named][:1]
    else:
        yield next(name for name, child in named.items() if child is head)


def _output_layer(module: Any) -> torch.nn.Module | None:
    return cast("torch.nn.Module | None", module.get_output_embeddings())


def _samples(module: PreTrainedModel, named: Mapping[str, torch.nn.Module]) -> Iterator[tuple[str, BaseSample]]:
    """Of the weights that PEFT saves beside an adapter of an lm_head."""
    for layer in (module.get_input_embeddings(), _output_layer(module)):
        if not isinstance(layer, torch.nn.Linear | torch.nn.Embedding):
            continue
        name = next(name for name, child in named.items() if child is layer)
        for own, parameter in layer.named_parameters(recurse=False):
            if not parameter.is_meta:
                yield f"{name}.{own}", BaseSample.of(parameter)
