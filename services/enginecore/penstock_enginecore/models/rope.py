"""Rotary (RoPE) and query scaling by position, tied down when the model is loaded."""

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from penstock_enginecore.models.errors import ModelLoadError

# Rotary scaling that would look at the whole batch.
#
# transformers' ``longrope`` and ``dynamic`` pick their frequencies in the forward pass, by the largest position of the
# batch: a long request would change what its neighbours get, and keys written under one choice would be read under
# another. Here the length the engine serves chooses once, see docs/adr/0011-rotary-scaling.md:
#
# - ``longrope``: the short factors where that length is within the one before the extension, else the long factors.
# - ``dynamic``: the frequencies of that length, which are the unscaled ones up to ``max_position_embeddings``.

_FROZEN = "frozen"
"""What modules tied down say they are: transformers updates only kinds it knows."""
_DYNAMIC = "dynamic"
_BY_BATCH = frozenset({_DYNAMIC, "longrope"})


def longest_sequence(config: PretrainedConfig, requested: int | None) -> int | None:
    """Tokens of the longest sequence that the model allows, None where the configuration does not say.

    Dynamic scaling goes ``factor`` times as far when ``requested`` asks for it, and not by itself: frequencies made for
    the longer sequences are worse for all shorter ones.
    """
    longest: int | None = getattr(config, "max_position_embeddings", None)
    factors = [float(p["factor"]) for p in _parameters(config) if p.get("rope_type") == _DYNAMIC and "factor" in p]
    if longest is None or requested is None or not factors:
        return longest
    return max(longest, min(requested, int(longest * min(factors))))


def _parameters(config: PretrainedConfig) -> Iterator[Mapping[str, Any]]:
    """The rotary parameters of the model, or those of each of its layer types."""
    parameters = getattr(config, "rope_parameters", None) or {}
    yield parameters
    yield from (p for p in parameters.values() if isinstance(p, Mapping))


@torch.no_grad()
def freeze_rotary(model: torch.nn.Module, max_model_len: int) -> None:
    """Fix the frequencies of all rotary modules of ``model``, on its device, for sequences of up to ``max_model_len``
    tokens. Raises ModelLoadError for a module that is not built as transformers builds them.
    """
    for name, module in model.named_modules():
        kinds = getattr(module, "rope_type", None)
        if isinstance(kinds, str) and kinds in _BY_BATCH:
            _freeze(name, module, kinds, None, max_model_len)
            module.rope_type = _FROZEN
        elif isinstance(kinds, Mapping) and not _BY_BATCH.isdisjoint(kinds.values()):
            for layer_type, kind in kinds.items():
                if kind in _BY_BATCH:
                    _freeze(name, module, kind, layer_type, max_model_len)
            kept = {layer_type: _FROZEN if kind in _BY_BATCH else kind for layer_type, kind in kinds.items()}
            module.__dict__["rope_type"] = kept


def _freeze(name: str, module: torch.nn.Module, kind: str, layer_type: str | None, max_model_len: int) -> None:
    prefix = "" if layer_type is None else f"{layer_type}_"
    inv_freq = getattr(module, f"{prefix}inv_freq", None)
    config = getattr(module, "config", None)
    if not isinstance(inv_freq, torch.Tensor) or not isinstance(config, PretrainedConfig):
        raise ModelLoadError(
            f"rotary scaling '{kind}' is not supported in module '{name}': it keeps its frequencies in an unknown place"
        )
    arguments = {} if layer_type is None else {"layer_type": layer_type}
    initialize = ROPE_INIT_FUNCTIONS[kind]
    frequencies, scaling = initialize(config, inv_freq.device, seq_len=max_model_len, **arguments)
    inv_freq.copy_(frequencies)
    setattr(module, f"{prefix}attention_scaling", scaling)
    if hasattr(module, "rope_init_fn"):
        _freeze_initializer(module, config, max_model_len)


def _freeze_initializer(module: Any, config: PretrainedConfig, max_model_len: int) -> None:
    """Phi-MoE's module computes frequencies in each forward pass, and has one magnitude for short and one for long
    batches.
    """
    frozen = (module.inv_freq, module.attention_scaling)
    module.rope_init_fn = lambda _config: frozen
    parameters = config.rope_parameters
    if "long_mscale" in parameters:
        long = max_model_len > parameters["original_max_position_embeddings"]
        mscale = parameters["long_mscale" if long else "short_mscale"]
        module.config = copy.deepcopy(config)
        module.config.rope_parameters.update(long_mscale=mscale, short_mscale=mscale)


# Queries that grow with their position, where the model's own code counts positions from the start of the batch.
#
# Llama 4 scales the queries of its layers without rotary positions by ``1 + attn_scale * log(1 + floor((p + 1) /
# floor_scale))`` (https://arxiv.org/abs/2501.19399), with p counted along the tensor. In a flat batch that is not the
# position, so the module is told not to, and attention scales with the positions of the step.

_ATTRIBUTE = "penstock_query_scale"


@dataclass(frozen=True, slots=True)
class QueryScale:
    """The two numbers of the formula in the module's docstring; ``floor_scale`` in tokens."""

    attn_scale: float
    floor_scale: float

    def apply(self, query: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """``query`` ``[tokens, num_heads, head_size]`` scaled by int64 ``positions`` ``[tokens]``, in its dtype."""
        steps = torch.floor((positions.float() + 1.0) / self.floor_scale)
        scales = torch.log1p(steps) * self.attn_scale + 1.0
        return (query * scales[:, None, None]).to(query.dtype)


def install_query_scales(model: torch.nn.Module) -> None:
    """Take the scaling of queries over from the attention modules of ``model`` that do it themselves. Raises
    ModelLoadError for one that does not do it as Llama 4 does.
    """
    for name, module in model.named_modules():
        if not getattr(module, "attn_temperature_tuning", False):
            continue
        try:
            scale = QueryScale(float(module.attn_scale), float(module.floor_scale))
            rotary = bool(module.use_rope)
        except (AttributeError, TypeError) as e:
            raise ModelLoadError(f"module '{name}' scales its queries by position in a way that is not known") from e
        module.__dict__["attn_temperature_tuning"] = False
        if not rotary:
            module.__dict__[_ATTRIBUTE] = scale


def query_scale(module: torch.nn.Module) -> QueryScale | None:
    """What ``install_query_scales`` left at an attention module."""
    scale = getattr(module, _ATTRIBUTE, None)
    return scale if isinstance(scale, QueryScale) else None
