"""A loaded model cut down to the part of one rank, with the sums and the gathering that make it whole again."""

from collections.abc import Mapping
from typing import Any

import torch
from transformers import PreTrainedModel

from penstock_enginecore.models.errors import ModelLoadError
from penstock_enginecore.parallel.collectives import Collectives
from penstock_enginecore.parallel.plan import Heads, Split, splits_of
from penstock_enginecore.parallel.probe import probe_logits

_KEYS_AND_VALUES = ("k_proj", "v_proj")
_TOLERANCE = 0.05
"""Difference, as a share of the logits' length, that rounding in half precision does not make."""


class SplitEmbedding(torch.nn.Module):
    """Vectors of some tokens each."""

    def __init__(self, weight: torch.nn.Parameter, collectives: Collectives) -> None:
        super().__init__()
        self._collectives = collectives
        self._first = collectives.rank * len(weight)
        self.weight = weight

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """``[..., hidden]`` of ``token_ids`` ``[...]``."""
        own = token_ids - self._first
        foreign = (own < 0) | (own >= len(self.weight))
        vectors = torch.nn.functional.embedding(own.masked_fill(foreign, 0), self.weight)
        return self._collectives.all_reduce(vectors.masked_fill(foreign[..., None], 0.0))


def split_model(module: PreTrainedModel, collectives: Collectives) -> None:
    """Keep of each layer what this rank computes, in place. Raises ModelLoadError for models that cannot be split so, and for
    those that compute something else then.

    Logits and hidden states are whole on every rank, and the same to the last bit.
    """
    size = collectives.size
    config: Any = module.config
    heads = Heads(
        config.num_attention_heads, getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    )
    heads.check(size)
    name_of_model = type(module).__name__
    plan: Any = getattr(module, "_tp_plan", None)
    splits = splits_of(name_of_model, plan, dict(module.named_modules()))
    expected = probe_logits(module)
    _Splitter(module, collectives, heads).split(splits)
    differs = (probe_logits(module) - expected).norm() / expected.norm()
    if not differs <= _TOLERANCE:
        raise ModelLoadError(
            f"executor.tensor_parallel_size is {size}; {name_of_model} computes something else in parts: its logits differ by "
            f"{differs:.0%}; use 1"
        )


class _Splitter:
    """Splits the layers of one model. A weight that several layers share is split once."""

    def __init__(self, module: PreTrainedModel, collectives: Collectives, heads: Heads) -> None:
        self._module = module
        self._collectives = collectives
        self._heads = heads
        self._vocabulary: dict[int, tuple[torch.Tensor, torch.nn.Parameter]] = {}

    def split(self, splits: Mapping[str, Split]) -> None:
        """Raises ModelLoadError for what is not split yet, or does not divide."""
        modules = dict(self._module.named_modules())
        for name, split in splits.items():
            layer = modules[name]
            if split == "embedding_rowwise" and type(layer) is torch.nn.Embedding:
                self._module.set_submodule(name, SplitEmbedding(self._own_words(layer.weight), self._collectives))
            elif type(layer) is not torch.nn.Linear or split == "embedding_rowwise":
                raise ModelLoadError(
                    f"executor.tensor_parallel_size: {name} of {type(self._module).__name__} is {type(layer).__name__}, "
                    "which is not split yet; use 1"
                )
            elif split == "rowwise":
                _split_inputs(name, layer, self._collectives)
            elif split == "colwise_gather_output":
                self._split_vocabulary(layer)
            else:
                _keep_outputs(layer, self._outputs(name, layer))
        for module in modules.values():
            if hasattr(module, "num_key_value_groups"):
                own = len(self._heads.kv_heads(self._collectives.rank, self._collectives.size))
                module.num_key_value_groups = self._heads.query // self._collectives.size // own

    def _outputs(self, name: str, layer: torch.nn.Linear) -> range:
        rank, size = self._collectives.rank, self._collectives.size
        if name.rpartition(".")[2] in _KEYS_AND_VALUES:
            own, width = self._heads.kv_heads(rank, size), layer.out_features // self._heads.kv
            return range(own.start * width, own.stop * width)
        each = _even(name, "outputs", layer.out_features, size)
        return range(rank * each, (rank + 1) * each)

    def _own_words(self, whole: torch.Tensor) -> torch.nn.Parameter:
        """As many rows for every rank: zeros behind the last."""
        if id(whole) not in self._vocabulary:
            count = -(-len(whole) // self._collectives.size)
            first = self._collectives.rank * count
            rows = whole[first : first + count]
            missing = rows.new_zeros(count - len(rows), *rows.shape[1:])
            self._vocabulary[id(whole)] = whole, _parameter(torch.cat([rows, missing]))
        return self._vocabulary[id(whole)][1]

    def _split_vocabulary(self, layer: torch.nn.Linear) -> None:
        total, collectives = layer.out_features, self._collectives
        layer.weight = self._own_words(layer.weight)
        if layer.bias is not None:
            layer.bias = self._own_words(layer.bias)
        layer.out_features = len(layer.weight)

        def gather(module: torch.nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:  # noqa: ARG001 - torch's signature
            return torch.cat(collectives.all_gather(output.contiguous()), dim=-1)[..., :total]

        layer.register_forward_hook(gather)


def _keep_outputs(layer: torch.nn.Linear, own: range) -> None:
    layer.weight = _parameter(layer.weight[own.start : own.stop])
    if layer.bias is not None:
        layer.bias = _parameter(layer.bias[own.start : own.stop])
    layer.out_features = len(own)


def _split_inputs(name: str, layer: Any, collectives: Collectives) -> None:
    each = _even(name, "inputs", layer.in_features, collectives.size)
    layer.weight = _parameter(layer.weight[:, collectives.rank * each : (collectives.rank + 1) * each])
    layer.in_features = each
    bias, layer.bias = layer.bias, None

    def add_up(module: torch.nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:  # noqa: ARG001 - torch's signature
        total = collectives.all_reduce(output.contiguous())
        return total if bias is None else total + bias

    layer.register_forward_hook(add_up)


def _even(name: str, what: str, count: int, size: int) -> int:
    if count % size:
        raise ModelLoadError(
            f"executor.tensor_parallel_size is {size}; the {count} {what} of {name} do not divide by it"
        )
    return count // size


def _parameter(part: torch.Tensor) -> torch.nn.Parameter:
    """Memory of its own: the whole can be freed."""
    return torch.nn.Parameter(part.clone(), requires_grad=False)
