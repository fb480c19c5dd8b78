"""Attention function that transformers' models call instead of their own attention function.

Models run on a flat batch ``[1, tokens]``, which has the tokens of all requests, without transformers' cache or mask.
Each attention module calls ``penstock_attention``, which passes the call to the context set by ``use_context``.
transformers builds no mask, because this function has no entry in its table of mask functions.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from transformers import AttentionInterface

from penstock_enginecore.attention.base import AttentionBackend, AttentionParams, StepPlan
from penstock_enginecore.attention.kv_cache import LayerCache
from penstock_enginecore.models.latent_hook import latent_heads
from penstock_enginecore.models.rope import query_scale

ATTENTION_NAME = "penstock"
"""Name of this attention function: the value of ``attn_implementation`` when models are loaded."""


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """Call of an attention module.

    Attributes:
        query: ``[tokens, num_heads, head_size]``.
        key: ``[tokens, num_kv_heads, head size]``.
        value: ``[tokens, num_kv_heads, head size]``.
        params: Scale, sliding window and other parameters of the attention.
        mask: Mask that the model built, or None.
        extra: Other arguments of the call that may affect attention.
    """

    module: torch.nn.Module
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    params: AttentionParams
    mask: object
    extra: Mapping[str, Any]


class AttentionContext(Protocol):
    """Handler of the attention calls in a forward pass."""

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """Return the output of attention, ``[tokens, num_heads, head_size_v]``."""


class StepContext:
    """Attention context of an engine step: writes new keys and values to the paged KV cache, then computes attention.
    There is one attention plan for each KV cache group.
    """

    def __init__(
        self, backend: AttentionBackend, layers: Mapping[torch.nn.Module, LayerCache], plans: list[StepPlan]
    ) -> None:
        self._backend = backend
        self._layers = layers
        self._plans = plans

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """Write the keys and values of the new tokens, scale queries by position if the model does, and compute
        attention. If the layer caches latents, the keys of the call are latents.

        A layer that shares the keys and values of another layer writes nothing, and reads the other layer's cache.
        Raises RuntimeError if the model computes such a layer for only some tokens of the step.
        """
        layer = self._layers[call.module]
        plan = self._plans[layer.group]
        if not layer.read_only:
            self._backend.write(layer.cache, plan, call.key, call.value)
        elif len(call.query) != len(call.key):
            raise RuntimeError(
                f"a layer that shares keys and values has {len(call.query)} queries for {len(call.key)} tokens: the model "
                "dropped tokens of the step"
            )
        scale = query_scale(call.module)
        query = call.query if scale is None else scale.apply(call.query, plan.positions)
        if heads := latent_heads(call.module):
            seen = self._backend.attend_latents(heads.absorbed(query), layer.cache, plan, call.params, heads.latent)
            return heads.expanded(seen).to(query.dtype)
        return self._backend.attend(query, call.key, call.value, layer.cache, plan, call.params)


_context: ContextVar[AttentionContext] = ContextVar("penstock_attention_context")


@contextmanager
def use_context(context: AttentionContext) -> Iterator[None]:
    """Return a context in which attention calls of forward passes go to ``context``."""
    token = _context.set(context)
    try:
        yield
    finally:
        _context.reset(token)


def penstock_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: object,
    scaling: float | None = None,
    dropout: float = 0.0,  # noqa: ARG001 - zero outside training
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **extra: Any,
) -> tuple[torch.Tensor, None]:
    """Compute attention, with the signature of transformers' ``AttentionInterface``.

    Queries, keys and values are ``[1, heads, tokens, head size]``. The output is ``[1, tokens, heads, head size]``.
    """
    params = AttentionParams(
        scaling=query.shape[-1] ** -0.5 if scaling is None else float(scaling),
        sliding_window=sliding_window,
        softcap=softcap,
        sinks=s_aux,
        attention_chunk=_attention_chunk(module),
    )
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    output = _context.get().attend(AttentionCall(module, q, k, v, params, attention_mask, extra))
    return output.unsqueeze(0), None


def _attention_chunk(module: torch.nn.Module) -> int | None:
    """Return the chunk size of the module's layer in tokens, from the configuration.

    transformers passes the chunk size only to its masks, not to the attention call.
    """
    config, index = getattr(module, "config", None), getattr(module, "layer_idx", None)
    types = getattr(config, "layer_types", None)
    if not types or not isinstance(index, int) or index >= len(types) or types[index] != "chunked_attention":
        return None
    return getattr(config, "attention_chunk_size", None)


def register() -> None:
    """Register ``attn_implementation="penstock"`` with transformers. Idempotent."""
    AttentionInterface.register(ATTENTION_NAME, penstock_attention)
