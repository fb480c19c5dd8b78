"""The attention of a layer over a latent (MLA), by absorbed projections: queries are brought to the latent's space and attend
there, and what they have seen leaves it for the heads' values. So a token of the cache is one vector for all heads.

What flows between is allocated, of sizes that the step's shape says.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec
import torch

from penstock_enginecore.attention.kv_cache import LayerCache
from penstock_enginecore.core.kv_cache.spec import KVCacheSpec
from penstock_enginecore.forward.cuda.activations import Activations
from penstock_enginecore.forward.cuda.adapted_products import Adapt, unadapted
from penstock_enginecore.forward.cuda.buffers import StepInputs
from penstock_enginecore.forward.cuda.kernel_api import Kernels, RotaryTable
from penstock_enginecore.forward.cuda.linear import Held, Linear, Product, merged
from penstock_enginecore.forward.cuda.plans import LatentPlan, ModelPlan
from penstock_enginecore.models.quantization.layers import QuantizedLinear


def latent_specs(plan: ModelPlan, specs: Mapping[str, KVCacheSpec]) -> dict[str, KVCacheSpec]:
    """``specs`` of the layers' caches, by their names in order: of those that attend over a latent one vector per token, of one
    head, without values.
    """
    found = dict(specs)
    for name, layer in zip(specs, plan.layers, strict=True):
        if isinstance(layer.attention, LatentPlan):
            size = layer.attention.latent + layer.attention.rotary_size
            found[name] = msgspec.structs.replace(specs[name], num_kv_heads=1, head_size=size, head_size_v=0)
    return found


class HeadWeights:
    """A matrix for each head: ``weight`` ``[heads, in_features, out_features]``, ``transposed`` with the last two exchanged."""

    def __init__(self, weight: torch.Tensor, kernels: Kernels, *, transposed: bool) -> None:
        self._weight = weight
        self._kernels = kernels
        self._transposed = transposed

    @property
    def num_bytes(self) -> int:
        """Bytes of it."""
        return self._weight.numel() * self._weight.element_size()

    @property
    def tensors(self) -> list[torch.Tensor]:
        """It."""
        return [self._weight]

    def to(self, device: torch.device) -> None:
        """Move it."""
        self._weight = self._weight.to(device)

    def multiply(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """Each head's rows of ``x`` ``[tokens, heads, in_features]`` times its matrix into ``out`` ``[tokens, heads,
        out_features]``, in both of which tokens and heads may lie apart.
        """
        heads = len(self._weight)
        if not self._kernels.batch_invariant:
            weight = self._weight.transpose(1, 2) if self._transposed else self._weight
            torch.bmm(x.transpose(0, 1), weight, out=out.transpose(0, 1))
            return
        rows = x.transpose(0, 1).reshape(heads * len(x), -1)
        ends = torch.arange(1, heads + 1, dtype=torch.int32, device=x.device) * len(x)
        product = rows.new_empty(len(rows), out.shape[2])
        self._kernels.grouped_product(rows, self._weight, None, ends, product, transposed=not self._transposed)
        torch.transpose_copy(product.view(heads, len(x), -1), 0, 1, out=out)


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """``first``: of what queries are made of, the latent and what turns; ``up``: from queries of low rank. ``absorb`` brings
    queries to the latent's space, ``expand`` leaves it.
    """

    plan: LatentPlan
    first: Product
    up: Product | None
    absorb: HeadWeights
    expand: HeadWeights
    output: Product
    kernels: Kernels

    @classmethod
    def of(cls, plan: LatentPlan, dtype: torch.dtype, kernels: Kernels, adapt: Adapt = unadapted) -> "LatentAttention":
        """Merges the weights that ``plan`` names, and copies those that stand between the latent and heads in ``dtype``: an
        adapter adds nothing to these.
        """
        absorb, expand = _by_head(plan, dtype)
        return cls(
            plan,
            adapt(plan.down, merged(plan.down, kernels)),
            None if plan.up is None else adapt([plan.up], merged([plan.up], kernels)),
            HeadWeights(absorb, kernels, transposed=False),
            HeadWeights(expand, kernels, transposed=True),
            adapt([plan.output], merged([plan.output], kernels)),
            kernels,
        )

    @property
    def held(self) -> tuple[Held, ...]:
        """Products and matrices of heads."""
        return self.first, *(() if self.up is None else (self.up,)), self.absorb, self.expand, self.output

    def run(
        self,
        x: torch.Tensor,
        inputs: StepInputs,
        activations: Activations,
        cache: LayerCache,
        rotary: RotaryTable,
        scale: float,
        out: torch.Tensor,
    ) -> None:
        """As of ``Attention``."""
        plan, kernels = self.plan, self.kernels
        group, latents, tokens = inputs.groups[cache.group], cache.cache.keys, len(x)
        product, size = activations.qkv, plan.plain_size + plan.rotary_size
        self.first.product(x, product)
        low = None if self.up is None else x.new_empty(tokens, self.up.in_features)
        kernels.latent_prologue(
            product,
            self.first.bias,
            plan.norms,
            rotary,
            inputs.positions,
            group.slots,
            latents,
            low,
            interleaved=plan.interleaved,
        )
        heads = product[:, : plan.num_heads * size]
        if self.up is not None and low is not None:
            heads = x.new_empty(tokens, plan.num_heads * size)
            self.up.affine(low, heads)
        heads = torch.unflatten(heads, 1, (plan.num_heads, size))
        query = x.new_empty(tokens, plan.num_heads, plan.latent + plan.rotary_size)
        kernels.turn_queries(heads, rotary, inputs.positions, group.slots, query, interleaved=plan.interleaved)
        self.absorb.multiply(heads[:, :, : plan.plain_size], query[:, :, : plan.latent])
        seen = x.new_empty(tokens, plan.num_heads, plan.latent)
        kernels.attend_latent(query, latents, group, plan.params.scaling, seen)
        self.expand.multiply(seen, activations.attended.view(tokens, plan.num_heads, plan.value_size))
        self.output.affine(activations.attended, out, scale)


@torch.inference_mode(False)
@torch.no_grad()
def _by_head(plan: LatentPlan, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Of the expansion, the rows that make keys and those that make values: ``[heads, rows, latent]`` each."""
    linear: Linear = plan.expansion
    weight = linear.dense(dtype).weight if isinstance(linear, QuantizedLinear) else linear.weight
    by_head = weight.detach().view(plan.num_heads, plan.plain_size + plan.value_size, plan.latent)
    keys, values = torch.split(by_head, [plan.plain_size, plan.value_size], dim=1)
    return keys.contiguous(), values.contiguous()
