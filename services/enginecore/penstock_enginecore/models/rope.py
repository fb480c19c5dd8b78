"""Rotary (RoPE) scaling and query scaling by position, fixed when the model is loaded."""

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from penstock_enginecore.models.errors import ModelLoadError

# Rotary scaling that in transformers depends on the other requests of the batch.
#
# The forward pass of transformers' ``longrope`` and ``dynamic`` chooses frequencies by the largest position of the
# batch. Therefore a long request would change the results of other requests. Later steps could also read keys that were
# rotated with other frequencies. Penstock chooses the frequencies once, by the served length, which is the maximum
# length of sequences (see docs/adr/0011):
#
# - ``longrope``: the short factors if the served length is within the original length, otherwise the long factors.
# - ``dynamic``: the frequencies of the served length. Up to ``max_position_embeddings``, these are not scaled.

_FROZEN = "frozen"
"""Value of ``rope_type`` that is set on modules whose frequencies are fixed. transformers updates the frequencies only
for types that it knows.
"""
_DYNAMIC = "dynamic"
_BY_BATCH = frozenset({_DYNAMIC, "longrope"})


def longest_sequence(config: PretrainedConfig, requested: int | None) -> int | None:
    """Return the length of the longest sequence that the model allows, in tokens, or None if the configuration does not
    define this length.

    Dynamic scaling allows sequences ``factor`` times as long, but only if ``requested`` needs them, because the
    frequencies for longer sequences reduce quality for all shorter sequences.
    """
    longest: int | None = getattr(config, "max_position_embeddings", None)
    factors = [float(p["factor"]) for p in _parameters(config) if p.get("rope_type") == _DYNAMIC and "factor" in p]
    if longest is None or requested is None or not factors:
        return longest
    return max(longest, min(requested, int(longest * min(factors))))


def _parameters(config: PretrainedConfig) -> Iterator[Mapping[str, Any]]:
    """Yield the model's rotary parameters, and the parameters of each layer type if the configuration has such."""
    parameters = getattr(config, "rope_parameters", None) or {}
    yield parameters
    yield from (p for p in parameters.values() if isinstance(p, Mapping))


@torch.no_grad()
def freeze_rotary(model: torch.nn.Module, max_model_len: int) -> None:
    """Fix the frequencies of all rotary modules of ``model``, on its device, for sequences of up to ``max_model_len``
    tokens.

    Raises ModelLoadError for a module with an unknown structure.
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
            f"rotary scaling '{kind}' is not supported in module '{name}': the module's frequencies were not found"
        )
    arguments = {} if layer_type is None else {"layer_type": layer_type}
    initialize = ROPE_INIT_FUNCTIONS[kind]
    frequencies, scaling = initialize(config, inv_freq.device, seq_len=max_model_len, **arguments)
    inv_freq.copy_(frequencies)
    setattr(module, f"{prefix}attention_scaling", scaling)
    if hasattr(module, "rope_init_fn"):
        _freeze_initializer(module, config, max_model_len)


def _freeze_initializer(module: Any, config: PretrainedConfig, max_model_len: int) -> None:
    """Fix the frequencies of Phi-MoE's rotary module. The module would compute the frequencies in each forward pass,
    with different magnitudes for batches with short and with long sequences.
    """
    frozen = (module.inv_freq, module.attention_scaling)
    module.rope_init_fn = lambda _config: frozen
    parameters = config.rope_parameters
    if "long_mscale" in parameters:
        long = max_model_len > parameters["original_max_position_embeddings"]
        mscale = parameters["long_mscale" if long else "short_mscale"]
        module.config = copy.deepcopy(config)
        module.config.rope_parameters.update(long_mscale=mscale, short_mscale=mscale)


# Scaling of queries by position, for models whose own code counts positions from the start of the batch.
#
# Llama 4 scales the queries of its layers without rotary positions by ``1 + attn_scale * log(1 + floor((p + 1) /
# floor_scale))`` (https://arxiv.org/abs/2501.19399), where p is the index of the token in the tensor. In a flat batch,
# p is not the token's position. So the module's own scaling is turned off, and Penstock's attention function scales by
# the positions of the step.

_ATTRIBUTE = "penstock_query_scale"


@dataclass(frozen=True, slots=True)
class QueryScale:
    """Parameters of Llama 4's formula for query scaling. ``floor_scale`` is in tokens. The formula adds ``offset`` to
    positions.
    """

    attn_scale: float
    floor_scale: float
    offset: float = 1.0

    def factors(self, positions: torch.Tensor) -> torch.Tensor:
        """Return the factors of queries, float32 ``[tokens]``, for int64 ``positions`` ``[tokens]``."""
        steps = torch.floor((positions.float() + self.offset) / self.floor_scale)
        return torch.log1p(steps) * self.attn_scale + 1.0

    def apply(self, query: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return ``query`` ``[tokens, num_heads, head_size]``, scaled by the formula for int64 ``positions``
        ``[tokens]``, in the dtype of ``query``.
        """
        return (query * self.factors(positions)[:, None, None]).to(query.dtype)


def install_query_scales(model: torch.nn.Module) -> None:
    """Turn off query scaling in the attention modules of ``model``, and store the parameters of the scaling for
    Penstock's attention function.

    Raises ModelLoadError for a module that does not use Llama 4's formula.
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
    """Return the scaling that ``install_query_scales`` stored on an attention module, or None."""
    scale = getattr(module, _ATTRIBUTE, None)
    return scale if isinstance(scale, QueryScale) else None


def rotary_query_scale(config: Any) -> QueryScale:
    """Return the scaling of queries that the rotary parameters of a Ministral 3 model describe. The model's modules
    apply this scaling to the positions that they get.
    """
    parameters = config.rope_parameters
    beta, length = parameters["llama_4_scaling_beta"], parameters["original_max_position_embeddings"]
    return QueryScale(float(beta), float(length), offset=0.0)
