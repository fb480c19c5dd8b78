"""Queries that grow with their position, where the model's own code counts positions from the start of the batch.

Llama 4 scales the queries of its layers without rotary positions by ``1 + attn_scale * log(1 + floor((p + 1) /
floor_scale))`` (https://arxiv.org/abs/2501.19399), with p counted along the tensor. In a flat batch that is not the
position, so the module is told not to, and attention scales with the positions of the step.
"""

from dataclasses import dataclass

import torch

from penstock_enginecore.models.errors import ModelLoadError

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
