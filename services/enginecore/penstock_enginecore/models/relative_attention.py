"""Attention with relative position biases in encoders: MPNet and DeBERTa-v2.

transformers computes these biases for a padded batch, and its modules do not call the attention interface. The functions
of this module replace the forward methods of the attention modules. The modules then work on a flat batch of prompts and
call the interface with a ``RelativeBias``.
"""

import math
from collections.abc import Callable
from typing import Any, Protocol, cast

import torch
from transformers import PretrainedConfig, PreTrainedModel
from transformers.models.deberta_v2.modeling_deberta_v2 import (
    DebertaV2Encoder,
    DisentangledSelfAttention,
    build_relative_position,
)
from transformers.models.mpnet.modeling_mpnet import MPNetEncoder, MPNetSelfAttention

from penstock_enginecore.models.attention_hook import penstock_attention
from penstock_enginecore.models.state_hook import ReadLinear

BIAS_ARGUMENT = "relative_bias"
"""Name of the argument of the attention interface that has the ``RelativeBias``."""


class RelativeBias(Protocol):
    """Bias of attention scores that depends on the distance between query and key."""

    def of_length(self, length: int, device: torch.device) -> torch.Tensor:
        """Return the part of the bias that all prompts of this length and all layers share."""

    def of_prompts(self, shared: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Return the bias of prompts of equal length, ``[prompts or 1, heads, length, length]``.

        Args:
            shared: The result of ``of_length`` for the prompts' length.
            rows: Indices of the prompts' tokens in the flat batch, int64 ``[prompts, length]``.
        """


def unsupported_relative(config: PretrainedConfig) -> str | None:
    """Return the reason why a model with relative attention is not supported, or None."""
    size = getattr(config, "conv_kernel_size", 0) or 0
    if size > 0:
        return f"its conv_kernel_size is {size}; supported: 0, as in DeBERTa-v3"
    return None


def replace_relative_attention(model: PreTrainedModel) -> None:
    """Replace the forward methods of the attention modules of MPNet or DeBERTa-v2 in place."""
    for module in list(model.modules()):
        if isinstance(module, MPNetEncoder):
            _replace_mpnet(module)
        elif isinstance(module, DebertaV2Encoder):
            _replace_deberta(module)


def _attend(
    module: torch.nn.Module,
    heads: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    scaling: float,
    bias: RelativeBias | None,
) -> torch.Tensor:
    """Return the attention output ``[1, tokens, heads * head size]``. ``heads`` are the queries, keys and values, each
    ``[1, heads, tokens, head size]``.
    """
    output, _ = penstock_attention(module, *heads, None, scaling=scaling, is_causal=False, relative_bias=bias)
    return output.flatten(2)


def _heads(states: torch.Tensor, head_size: int) -> torch.Tensor:
    """Return ``[1, tokens, heads * head size]`` as ``[1, heads, tokens, head size]``."""
    return states.view(*states.shape[:-1], -1, head_size).transpose(1, 2)


# MPNet: one learned bias per head and distance, shared by all layers.


class _LearnedBias:
    def __init__(self, encoder: MPNetEncoder) -> None:
        self._compute = cast("Callable[[torch.Tensor], torch.Tensor]", encoder.compute_position_bias)

    def of_length(self, length: int, device: torch.device) -> torch.Tensor:
        return self._compute(torch.empty(1, length, device=device))

    def of_prompts(self, shared: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:  # noqa: ARG002 - a protocol
        return shared


def _replace_mpnet(encoder: Any) -> None:
    bias = _LearnedBias(encoder)
    # The encoder would otherwise compute the bias of the whole batch, [heads, tokens, tokens].
    encoder.compute_position_bias = lambda hidden_states: None  # noqa: ARG005 - the signature of transformers
    for layer in encoder.layer:
        module: MPNetSelfAttention = layer.attention.attn
        module.forward = _mpnet_forward(module, bias)  # type: ignore[method-assign]


def _mpnet_forward(module: Any, bias: RelativeBias) -> Callable[..., tuple[torch.Tensor]]:
    def forward(hidden_states: torch.Tensor, *_: object, **__: object) -> tuple[torch.Tensor]:
        size = module.attention_head_size
        q, k, v = (_heads(linear(hidden_states), size) for linear in (module.q, module.k, module.v))
        return (module.o(_attend(module, (q, k, v), size**-0.5, bias)),)

    return forward


# DeBERTa-v2: products of queries with embedded distances, and of keys with embedded distances.


class DistanceLinear(ReadLinear):
    """Linear layer that also computes embedded distances, which all prompts of a step share."""


class _DisentangledBias:
    """Bias of one layer. See section 3 of the DeBERTa paper (arXiv 2006.03654)."""

    def __init__(self, module: Any, of_queries: torch.Tensor | None, of_keys: torch.Tensor | None) -> None:
        """Create the bias. ``of_queries`` and ``of_keys`` are the products of all queries and keys with the embedded
        distances, ``[tokens, heads, 2 * span]``, or None if the model does not use the product.
        """
        self._module = module
        self._of_queries = of_queries
        self._of_keys = of_keys

    def of_length(self, length: int, device: torch.device) -> torch.Tensor:
        """Return the bucket of the distance of each pair, int64 ``[length, length]``."""
        module = self._module
        tokens = torch.empty(length, 1, device=device)
        buckets: torch.Tensor = build_relative_position(
            tokens, tokens, bucket_size=module.position_buckets, max_position=module.max_relative_positions
        )
        span = int(module.pos_ebd_size)
        return (buckets[0] + span).clamp(0, 2 * span - 1)

    def of_prompts(self, shared: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        bias: torch.Tensor | None = None
        if self._of_queries is not None:
            bias = _gathered(self._of_queries, rows, shared)
        if self._of_keys is not None:
            # The bucket of the distance from key to query is the one of the opposite distance, seen from the key.
            by_key = _gathered(self._of_keys, rows, shared.transpose(0, 1)).transpose(-1, -2)
            bias = by_key if bias is None else bias + by_key
        if bias is None:
            raise RuntimeError("a layer without products with distances has no relative bias")
        return bias


def _gathered(products: torch.Tensor, rows: torch.Tensor, buckets: torch.Tensor) -> torch.Tensor:
    """Return ``[prompts, heads, length, length]``: for each token and each other token, the product for their bucket."""
    of_rows = products[rows].transpose(1, 2)  # [prompts, heads, length, 2 * span]
    return of_rows.gather(-1, buckets.expand(*of_rows.shape[:3], -1))


def _replace_deberta(encoder: Any) -> None:
    # The encoder would otherwise compute masks and distances of the whole batch, [tokens, tokens].
    encoder.get_attention_mask = lambda mask: mask
    encoder.get_rel_pos = lambda *_, **__: None
    for layer in encoder.layer:
        module: DisentangledSelfAttention = layer.attention.self
        for linear in _of_distances(module):
            linear.__class__ = DistanceLinear
        module.forward = _deberta_forward(module)  # type: ignore[method-assign]


def _of_distances(module: Any) -> list[torch.nn.Linear]:
    """Return the linear layers that also compute embedded distances. Adapters cannot update them, because prompts with
    different adapters share the distances.
    """
    if not module.relative_attention:
        return []
    if module.share_att_key:
        of_kinds = {"c2p": module.key_proj, "p2c": module.query_proj}
    else:
        of_kinds = {"c2p": getattr(module, "pos_key_proj", None), "p2c": getattr(module, "pos_query_proj", None)}
    return [linear for kind, linear in of_kinds.items() if kind in module.pos_att_type]


def _deberta_forward(module: Any) -> Callable[..., tuple[torch.Tensor, None]]:
    size = int(module.attention_head_size)
    kinds = [kind for kind in ("c2p", "p2c") if kind in module.pos_att_type]
    scaling = 1 / math.sqrt(size * (1 + len(kinds)))
    has_bias = bool(module.relative_attention and kinds)

    def forward(
        hidden_states: torch.Tensor, *_: object, rel_embeddings: torch.Tensor | None = None, **__: object
    ) -> tuple[torch.Tensor, None]:
        linears = (module.query_proj, module.key_proj, module.value_proj)
        q, k, v = (_heads(linear(hidden_states), size) for linear in linears)
        bias = None
        if has_bias and rel_embeddings is not None:
            bias = _disentangled(module, q, k, rel_embeddings, scaling)
        return _attend(module, (q, k, v), scaling, bias), None

    return forward


def _disentangled(
    module: Any, q: torch.Tensor, k: torch.Tensor, embedded: torch.Tensor, scaling: float
) -> _DisentangledBias:
    """Return the bias for queries and keys ``[1, heads, tokens, head size]``. ``embedded`` has the embeddings of the
    distances, ``[2 * span, hidden size]``.
    """
    size = q.shape[-1]
    embedded = embedded[None, : 2 * int(module.pos_ebd_size)]
    of_queries = of_keys = None
    if "c2p" in module.pos_att_type:
        linear = module.key_proj if module.share_att_key else module.pos_key_proj
        of_queries = _products(q, _heads(linear(embedded), size)) * scaling
    if "p2c" in module.pos_att_type:
        linear = module.query_proj if module.share_att_key else module.pos_query_proj
        of_keys = _products(k, _heads(linear(embedded), size)) * scaling
    return _DisentangledBias(module, of_queries, of_keys)


def _products(tokens: torch.Tensor, distances: torch.Tensor) -> torch.Tensor:
    """Return the products ``[tokens, heads, 2 * span]`` of tokens and distances, each ``[1, heads, ..., head size]``."""
    return (tokens @ distances.transpose(-1, -2))[0].transpose(0, 1)
