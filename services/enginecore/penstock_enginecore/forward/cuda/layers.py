"""Layers of the fused decoder: attention, latent attention (MLA), and the launches of kernels and matrix products of
each layer.

A norm kernel also computes the residual addition before the norm. The prologue kernel adds the biases of queries, keys
and values. A layer has four matrix products and five to seven kernel launches.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
import torch

from penstock_enginecore.attention.kv_cache import LayerCache
from penstock_enginecore.core.kv_cache.spec import KVCacheSpec
from penstock_enginecore.forward.cuda.adapters import Adapt, unadapted
from penstock_enginecore.forward.cuda.buffers import Activations, StepInputs, Widths
from penstock_enginecore.forward.cuda.kernel_api import Norm, RotaryTable
from penstock_enginecore.forward.cuda.linear import Held, Linear, Product, merged
from penstock_enginecore.forward.cuda.mlp import MLP, Experts, GatedMLP, mlp_of
from penstock_enginecore.models.decoder_plan import (
    AttentionPlan,
    LatentPlan,
    LayerPlan,
    ModelPlan,
    RecurrentPlan,
    present,
)
from penstock_enginecore.models.errors import UnsuitableError
from penstock_enginecore.models.quantization.layers import QuantizedLinear

if TYPE_CHECKING:  # Triton is imported only if there is a device for its kernels
    from penstock_enginecore.forward.cuda.triton_kernels import TritonKernels

# Rotary tables, computed by the model's own modules.


def rotary_table(module: Any, max_len: int, device: torch.device, *variant: str, twice: bool = True) -> RotaryTable:
    """Return the cosines and sines of all positions below ``max_len`` for rotary embeddings, in float32 for every model
    dtype.

    Args:
        module: The model's rotary embedding. This module returns cosines and sines, or complex numbers that combine a
            cosine and a sine.
        max_len: Number of positions.
        device: The device of the result.
        variant: Further arguments of ``module``, for example the kind of layer for Gemma 3.
        twice: Whether ``module`` returns each number twice, for both halves of a head.

    Raises:
        UnsuitableError: The numbers for the two halves of a head are not equal.
    """
    like = torch.empty(0, dtype=torch.float32, device=device)
    tables = []
    made = module(like, torch.arange(max_len, device=device)[None], *variant)
    if isinstance(made, torch.Tensor) and made.is_complex():  # one complex number for each pair of rotated elements
        made, twice = (made.real, made.imag), False
    for table in made:
        half = table.shape[-1] // 2 if twice else table.shape[-1]
        if table.dtype != torch.float32 or (twice and not torch.equal(table[..., :half], table[..., half:])):
            raise UnsuitableError(
                f"{type(module).__name__} does not rotate the two halves of a head by the same angles"
            )
        tables.append(table[0, :, :half].contiguous())
    cosines, sines = tables
    return RotaryTable(cosines, sines)


class Attention(Protocol):
    """Attention of one layer, with the projections before and after the attention."""

    @property
    def held(self) -> tuple[Held, ...]:
        """Objects that own the weights of the attention's projections."""

    @property
    def first(self) -> Product:
        """First matrix product, whose output is ``Activations.qkv``."""

    @property
    def output(self) -> Product:
        """Last matrix product, whose input is ``Activations.attended``."""

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
        """Compute attention for ``x`` ``[tokens, hidden size]``, and write the result times ``scale`` to ``out``.

        Also writes the keys and values of new tokens into ``cache``.
        """


@dataclass(frozen=True, slots=True)
class HeadsAttention:
    """Attention with one matrix product for queries, keys and values. The KV cache has keys and values of each KV head."""

    plan: AttentionPlan
    first: Product
    output: Product
    kernels: "TritonKernels"

    @classmethod
    def of(cls, plan: AttentionPlan, kernels: "TritonKernels", adapt: Adapt = unadapted) -> "HeadsAttention":
        """Return the attention that computes ``plan``, with the weights of its projections merged."""
        first = adapt(plan.qkv, merged(plan.qkv, kernels))
        return cls(plan, first, adapt([plan.output], merged([plan.output], kernels)), kernels)

    @property
    def held(self) -> tuple[Held, ...]:
        """The first and the last matrix product."""
        return self.first, self.output

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
        """Compute attention, with the buffers of ``activations`` for intermediate results; see ``Attention.run``."""
        plan = self.plan
        group = inputs.groups[cache.group].for_window(plan.params.sliding_window)
        keys, values = cache.cache.keys, cache.cache.values
        heads = (-1, plan.num_heads, plan.head_size)
        query, attended = activations.query.view(heads), activations.attended.view(heads)
        self.first.product(x, activations.qkv)
        self.kernels.prologue(
            activations.qkv,
            self.first.bias,
            plan.own_norms,
            rotary,
            inputs.positions,
            group.slots,
            keys,
            values,
            query,
            cache.cache.scales,
        )
        self.kernels.attend(query, keys, values, group, plan.params, attended, cache.cache.scales)
        self.output.affine(activations.attended, out, scale)


# Latent attention (MLA) of a layer, with absorbed projections.
#
# Queries are projected to the latent space, and attention runs there. The result is then projected to the heads'
# values. So the KV cache needs only one vector per token for all heads. Each step allocates its intermediate tensors.
# The sizes of these tensors depend only on the step's shape.


def latent_specs(plan: ModelPlan, specs: Mapping[str, KVCacheSpec]) -> dict[str, KVCacheSpec]:
    """Return ``specs`` by layer name, in the same order. The spec of a latent attention layer is changed to one vector
    per token: one KV head without values.
    """
    found = dict(specs)
    for name, layer in zip(specs, plan.layers, strict=True):
        if isinstance(layer.attention, LatentPlan):
            size = layer.attention.latent + layer.attention.rotary_size
            found[name] = msgspec.structs.replace(specs[name], num_kv_heads=1, head_size=size, head_size_v=0)
    return found


class HeadWeights(Held):
    """One matrix per attention head, ``weight`` ``[heads, in_features, out_features]``. If ``transposed`` is true, the
    last two dimensions of ``weight`` are swapped.
    """

    def __init__(self, weight: torch.Tensor, kernels: "TritonKernels", *, transposed: bool) -> None:
        self._weight = weight
        self._kernels = kernels
        self._transposed = transposed

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Matrices of all heads."""
        return [self._weight]

    def to(self, device: torch.device) -> None:
        """Move the matrices to ``device``."""
        self._weight = self._weight.to(device)

    def multiply(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """Multiply each head's rows of ``x`` ``[tokens, heads, in_features]`` by the head's matrix.

        The result is written to ``out`` ``[tokens, heads, out_features]``. In both tensors, tokens and heads may be
        strided.
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
    """Latent attention (MLA).

    Attributes:
        first: Matrix product whose output has the input of the queries, the latent and the rotary part.
        up: Matrix product that computes queries from their low-rank input, or None for a model without low-rank
            queries.
        absorb: Projects queries to the latent space.
        expand: Projects the attention's output from the latent space to the heads' values.
    """

    plan: LatentPlan
    first: Product
    up: Product | None
    absorb: HeadWeights
    expand: HeadWeights
    output: Product
    kernels: "TritonKernels"

    @classmethod
    def of(
        cls, plan: LatentPlan, dtype: torch.dtype, kernels: "TritonKernels", adapt: Adapt = unadapted
    ) -> "LatentAttention":
        """Return the attention that computes ``plan``, with the weights of its projections merged.

        The weights that convert between the latent and the heads are copied in ``dtype``. LoRA adapters cannot update
        these copies.
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
        """The matrix products, and the matrices of the heads."""
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
        """Compute attention; see ``Attention.run``."""
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
    """Split the weights that expand the latent into the rows that compute keys and the rows that compute values, each
    ``[heads, rows, latent]``.
    """
    linear: Linear = plan.expansion
    weight = linear.dense(dtype).weight if isinstance(linear, QuantizedLinear) else linear.weight
    by_head = weight.detach().view(plan.num_heads, plan.plain_size + plan.value_size, plan.latent)
    keys, values = torch.split(by_head, [plan.plain_size, plan.value_size], dim=1)
    return keys.contiguous(), values.contiguous()


AfterLayer = Callable[[int, torch.Tensor], None]
"""Function that is called with the index and the output ``[tokens, hidden size]`` of each layer. The function is also
called with index -1 and the input of the first layer.
"""


@dataclass(frozen=True, slots=True)
class _Layer:
    plan: LayerPlan
    attention: Attention
    mlp: MLP
    rotary: int

    @classmethod
    def of(cls, plan: LayerPlan, dtype: torch.dtype, kernels: "TritonKernels", adapt: Adapt) -> "_Layer":
        if isinstance(plan.attention, RecurrentPlan) or plan.mlp is None:
            raise UnsuitableError(f"{plan.name} is recurrent, or has no MLP")
        mlp = mlp_of(plan.mlp, plan.residual_scale * plan.output_scales[1], kernels, adapt)
        return cls(plan, _attention_of(plan.attention, dtype, kernels, adapt), mlp, plan.attention.rotary)

    @property
    def held(self) -> tuple[Held, ...]:
        return *self.attention.held, *self.mlp.held


def _attention_of(
    plan: AttentionPlan | LatentPlan, dtype: torch.dtype, kernels: "TritonKernels", adapt: Adapt
) -> Attention:
    if isinstance(plan, LatentPlan):
        return LatentAttention.of(plan, dtype, kernels, adapt)
    return HeadsAttention.of(plan, kernels, adapt)


class Layers:
    """Computation of a model's layers, from token ids to the output of the last norm. The constructor merges the
    layers' weights.

    Raises UnsuitableError if the kernels do not support the plan. The attribute ``widths`` has the sizes of the
    activations.

    Args:
        max_len: Number of positions.
        adapt: Function that replaces a matrix product by one to which LoRA adapters can be added.
    """

    def __init__(
        self, plan: ModelPlan, max_len: int, kernels: "TritonKernels", device: torch.device, adapt: Adapt = unadapted
    ) -> None:
        self._rotary = [
            rotary_table(plan.rotary, max_len, device, *variant, twice=plan.family.turned != "half")
            for variant in plan.rotary_variants
        ]
        self._plan = plan
        self._kernels = kernels
        self._layers = [_Layer.of(layer, plan.embedding.dtype, kernels, adapt) for layer in plan.layers]
        self.widths = self._widths()
        self._embedding_scale = present(plan.embedding_scale, "known embedding")
        before = [present(layer.norms_before[0], "norm before attention") for layer in plan.layers]
        self._first_norm, self._next_norms = before[0], [*before[1:], present(plan.norm, "last norm")]
        self._mlp_norms = [present(layer.norms_before[1], "norm before MLPs") for layer in plan.layers]

    @property
    def held(self) -> list[Held]:
        """Objects that own the weights of the layers."""
        return [held for layer in self._layers for held in layer.held]

    def to(self, device: torch.device) -> None:
        """Move the weights of the matrix products, and the rotary tables."""
        for held in self.held:
            held.to(device)
        self._rotary = [table.to(device) for table in self._rotary]

    def embed(self, token_ids: torch.Tensor, out: torch.Tensor) -> None:
        """Write the embeddings of ``token_ids`` ``[tokens]``, multiplied by the embedding's scale, to ``out``
        ``[tokens, hidden size]``.
        """
        torch.index_select(self._plan.embedding, 0, token_ids, out=out)
        if self._embedding_scale != 1.0:
            out.mul_(self._embedding_scale)

    def scale_input(self, x: torch.Tensor) -> None:
        """Multiply the first layer's input ``[tokens, hidden size]`` in place by the model's factor. Used for
        embeddings of token ids and for embeddings from requests.
        """
        if self._plan.input_scale != 1.0:
            x.mul_(self._plan.input_scale)

    def run(
        self,
        inputs: StepInputs,
        activations: Activations,
        caches: Sequence[LayerCache],
        after_layer: AfterLayer | None = None,
    ) -> torch.Tensor:
        """Compute all layers. The input of the first layer is in ``activations.residual``. Returns the output of the
        last norm, ``[tokens, hidden size]``.
        """
        kernels, residual = self._kernels, activations.residual
        self.scale_input(residual)
        if after_layer is not None:
            after_layer(-1, residual)
        x, spare = activations.normed, activations.x
        media = inputs.media
        tables = self._rotary if media is None or media.rotary is None else media.rotary
        deepstack = () if media is None or media.deepstack is None else media.deepstack
        kernels.add_rms_norm(residual, None, self._first_norm, x)
        for i, (layer, cache, next_norm) in enumerate(zip(self._layers, caches, self._next_norms, strict=True)):
            plan = layer.plan
            after = plan.norms_after
            rotary = tables[layer.rotary]
            scale = plan.residual_scale * plan.output_scales[0]
            layer.attention.run(x, inputs, activations, cache, rotary, scale, spare)
            x, spare = self._add_norm(spare, x, residual, after[0], self._mlp_norms[i])
            if isinstance(layer.mlp, Experts) and after[1] is None and i >= len(deepstack):
                kernels.add_rms_norm(layer.mlp.rows(x, inputs, kernels), residual, next_norm, spare)
                x, spare = spare, x
            else:
                layer.mlp.run(x, inputs, activations, kernels, spare)
                if i < len(deepstack):
                    spare[: deepstack[i].shape[0]].add_(deepstack[i])
                x, spare = self._add_norm(spare, x, residual, after[1], next_norm)
            if after_layer is not None:
                after_layer(i, residual)
        return x

    def _add_norm(
        self, x: torch.Tensor, spare: torch.Tensor, residual: torch.Tensor, after: Norm | None, before: Norm
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add ``x`` to ``residual``, and apply the norm ``before`` to the sum. If the norm ``after`` is given, apply
        ``after`` to ``x`` before the addition.

        Returns the normalized sum, and a tensor that may be overwritten.
        """
        if after is not None:
            self._kernels.add_rms_norm(x, None, after, spare)
            x, spare = spare, x
        self._kernels.add_rms_norm(x, residual, before, spare)
        return spare, x

    def _widths(self) -> Widths:
        """Return the sizes of the activations. Raises UnsuitableError if the layers have different sizes."""
        found = {
            (layer.output.out_features, layer.first.out_features, layer.output.in_features)
            for layer in (each.attention for each in self._layers)
        }
        gated = {layer.mlp.down.in_features for layer in self._layers if isinstance(layer.mlp, GatedMLP)}
        if len(found) > 1 or len(gated) > 1:
            raise UnsuitableError("the model's layers have different sizes")
        [(hidden, qkv, attended)] = found
        intermediate = gated.pop() if gated else 0
        return Widths(hidden, qkv, attended, intermediate, self._plan.own_head.out_features)
