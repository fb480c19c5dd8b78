"""Names that model classes of transformers give to their parts: base model, embedding, layers' attention and MLP, and
last norm.
"""

from collections.abc import Sequence
from typing import Any

import torch

BASES = ("model", "gpt_neox")
EMBEDDINGS = ("embed_tokens", "embed_in")
ATTENTIONS = ("self_attn", "attention")
MLPS = ("mlp", "feed_forward")
FINAL_NORMS = ("norm", "final_layernorm", "final_layer_norm")


def base_of(module: Any) -> Any:
    """Return a causal language model without its head."""
    return getattr(module, named_part(module, BASES))


def own_layers(base: Any) -> list[Any]:
    """Return the layers of a base model that belong to this pipeline stage."""
    return [layer for layer in base.layers if any(hasattr(layer, name) for name in ATTENTIONS)]


def attention_of(layer: Any) -> Any:
    """Return the attention module of a layer."""
    return getattr(layer, named_part(layer, ATTENTIONS))


def mlp_part(layer: Any) -> Any:
    """Return the MLP of a layer."""
    return getattr(layer, named_part(layer, MLPS))


def named_part(module: torch.nn.Module, names: Sequence[str]) -> str:
    """Return the first of ``names`` that ``module`` has, or the first of all names."""
    return next((name for name in names if hasattr(module, name)), names[0])
