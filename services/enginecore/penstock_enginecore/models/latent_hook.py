"""Latent attention (MLA) with a KV cache of latents, in transformers' own attention modules.

transformers' modules call ``expand_kv`` with the normed latents and the rotated part of the keys, and get keys and
values of all heads from ``kv_b_proj``. ``keep_latents`` replaces both: keys are the latents themselves, and
``LatentHeads`` projects queries into the latent space and outputs out of it. The scores and the outputs are the same
numbers, up to rounding, because matrix products are associative.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

_SIZES = ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
"""Attributes of transformers' modules with latent attention: the sizes of a latent, of the rotated part of a key, of
the other part, and of a value.
"""


class Update(Protocol):
    """LoRA update, which adds ``x @ a.T @ b.T`` to the output of a linear layer; see ``lora.adapter.LowRankUpdate``."""

    @property
    def a(self) -> torch.Tensor:
        """Matrix ``[rank, in features]``."""

    @property
    def b(self) -> torch.Tensor:
        """Matrix ``[out features, rank]``."""


class LatentHeads(torch.nn.Linear):
    """Replacement for ``kv_b_proj`` of an attention module, with the same weight, hooks and numbers of features.

    The rows of the weight ``[heads * (plain + value), latent]`` are those of ``plain`` elements of the first head's
    key, of ``value`` elements of the first head's value, then those of the next head.
    """

    def __init__(self, linear: torch.nn.Linear, latent: int, plain: int, value: int) -> None:
        torch.nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight = linear.weight
        self.register_parameter("bias", None)
        self._forward_pre_hooks, self._forward_hooks = linear._forward_pre_hooks, linear._forward_hooks
        self.latent, self.plain, self.value = latent, plain, value
        self._absorbs = False

    @property
    def num_heads(self) -> int:
        """Number of heads that this rank computes."""
        return self.out_features // (self.plain + self.value)

    def absorbed(self, query: torch.Tensor) -> torch.Tensor:
        """Project queries ``[tokens, heads, plain + rotated]`` into the latent space. Returns ``[tokens, heads, latent +
        rotated]``.
        """
        plain, rotated = query[:, :, : self.plain], query[:, :, self.plain :]
        projected: torch.Tensor = torch.unflatten(self(plain.flatten(1), True), 1, (self.num_heads, self.latent))
        return torch.cat([projected, rotated], dim=-1)

    def expanded(self, seen: torch.Tensor) -> torch.Tensor:
        """Project outputs of attention ``[tokens, heads, latent]`` to the heads' values, ``[tokens, heads, value]``."""
        projected: torch.Tensor = self(seen.flatten(1), False)
        return torch.unflatten(projected, 1, (self.num_heads, self.value))

    def forward(self, x: torch.Tensor, absorbs: bool) -> torch.Tensor:  # type: ignore[override]  # another use
        """Multiply each head's part of ``x`` ``[tokens, heads * size]`` by the head's matrix.

        The hooks of LoRA adapters add to the output of this method. ``absorbs`` is true for queries, and false for
        outputs.
        """
        self._absorbs = absorbs
        return self.products(torch.unflatten(x, 1, (self.num_heads, -1)), absorbs=absorbs)

    def products(self, x: torch.Tensor, *, absorbs: bool) -> torch.Tensor:
        """Return the products of ``forward`` for ``x`` ``[tokens, heads, size]``, float32, with all heads contiguous.

        They are intermediate results that full keys and values do not have, so they are not rounded to 16 bits.
        """
        keys, values = by_head(self.weight, self.plain, self.value)
        weight = keys if absorbs else values.transpose(1, 2)
        product = torch.bmm(x.transpose(0, 1).float(), weight.float())
        return product.transpose(0, 1).flatten(1)

    def addition(self, update: Update) -> Callable[[torch.Tensor, torch.Tensor], None]:
        """Return a function that adds the product of a LoRA update of ``kv_b_proj`` to the output of ``forward``."""
        a = update.a.to(self.weight.device)
        rows = update.b.to(self.weight.device).view(-1, self.plain + self.value, len(a))
        keys, values = rows[:, : self.plain], rows[:, self.plain :]

        def add(x: torch.Tensor, out: torch.Tensor) -> None:
            heads = torch.unflatten(x.float(), 1, (len(rows), -1))
            if self._absorbs:
                added = torch.einsum("thp,hpr->thr", heads, keys) @ a
            else:
                added = torch.einsum("thr,hvr->thv", heads @ a.T, values)
            out += added.flatten(1).to(out.dtype)

        return add


def by_head(weight: torch.Tensor, plain: int, value: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rows of a weight of ``kv_b_proj`` for keys and for values, each ``[heads, rows, latent]``."""
    rows = weight.view(-1, plain + value, weight.shape[1])
    return rows[:, :plain], rows[:, plain:]


def latent_heads(attention: torch.nn.Module) -> LatentHeads | None:
    """Return the projections of an attention module that caches latents, or None for another attention module."""
    heads = attention._modules.get("kv_b_proj")
    return heads if isinstance(heads, LatentHeads) else None


@dataclass(frozen=True, slots=True)
class Replaced:
    """Attention modules that ``keep_latents`` has changed, and their own ``kv_b_proj``."""

    parts: Sequence[tuple[Any, torch.nn.Linear]]

    def undo(self) -> None:
        """Make the modules compute keys and values of all heads again."""
        for attention, linear in self.parts:
            del attention.expand_kv
            attention.kv_b_proj = linear


def has_latents(attention: Any) -> bool:
    """Return whether ``keep_latents`` supports an attention module of transformers."""
    if not all(isinstance(getattr(attention, name, None), int) for name in _SIZES) or not hasattr(
        attention, "expand_kv"
    ):
        return False
    linear = attention._modules.get("kv_b_proj")
    if type(linear) is not torch.nn.Linear or "bias" in dict(linear.named_parameters()):
        return False
    return linear.in_features == int(attention.kv_lora_rank)


def keep_latents(attentions: Sequence[Any]) -> Replaced:
    """Make attention modules, for which ``has_latents`` is true, call attention with latents instead of keys."""
    parts = []
    for attention in attentions:
        linear, sizes = attention.kv_b_proj, [getattr(attention, name) for name in _SIZES]
        parts.append((attention, linear))
        attention.kv_b_proj = LatentHeads(linear, sizes[0], *sizes[2:])
        attention.expand_kv = _joined
    return Replaced(parts)


def _joined(latent: torch.Tensor, rotated: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return one key for all heads, ``[1, 1, tokens, latent + rotated]``, and a value without elements."""
    return torch.cat([latent, rotated], dim=-1), latent[..., :0]
