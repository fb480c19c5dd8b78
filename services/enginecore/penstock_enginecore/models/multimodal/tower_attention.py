"""The attention function of towers, in place of torch's where somebody else is to attend."""

from collections.abc import Callable
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

_NAME = "penstock_towers"


class Attends(Protocol):
    """Attention of whole sequences in which every token sees every other."""

    def takes(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
        """Whether it attends over ``[sequences, heads, tokens, head size]`` of these."""

    def __call__(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float) -> torch.Tensor:
        """``[sequences, tokens, heads, value size]``."""


_attending: WeakKeyDictionary[torch.nn.Module, Attends] = WeakKeyDictionary()


def attend_by(tower: torch.nn.Module, attends: Attends) -> None:
    """Let ``attends`` do what it takes of the attention of a ``tower``, which is torch's."""
    for module in tower.modules():
        config: Any = getattr(module, "config", None)
        # A configuration of several sections is that of the text model, too.
        if getattr(config, "sub_configs", True) or config._attn_implementation != "sdpa":
            continue
        config._attn_implementation = _NAME
    for module in tower.modules():
        _attending[module] = attends


def _tower_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """The signature of transformers' ``AttentionInterface``."""
    attends = _attending.get(module)
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    plain = attention_mask is None and not causal and others.get("position_bias") is None and not dropout
    if attends is not None and plain and attends.takes(query, key, value):
        return attends(query, key, value, query.shape[-1] ** -0.5 if scaling is None else float(scaling)), None
    torch_attention: Callable[..., tuple[torch.Tensor, None]] = sdpa_attention_forward
    return torch_attention(
        module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, is_causal=is_causal, **others
    )


AttentionInterface.register(_NAME, _tower_attention)
AttentionMaskInterface.register(_NAME, sdpa_mask)
