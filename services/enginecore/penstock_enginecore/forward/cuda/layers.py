"""The layers of the fused decoder: in which order kernels and products are launched.

Norms begin with the add before them, biases of queries, keys and values are left to the prologue: a layer is four products and
five to seven launches.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from penstock_enginecore.attention.kv_cache import LayerCache
from penstock_enginecore.forward.cuda.activations import Activations, Widths
from penstock_enginecore.forward.cuda.adapted_products import Adapt, unadapted
from penstock_enginecore.forward.cuda.attention_layer import Attention, HeadsAttention
from penstock_enginecore.forward.cuda.buffers import StepInputs
from penstock_enginecore.forward.cuda.kernel_api import Kernels, Norm
from penstock_enginecore.forward.cuda.latent_layer import LatentAttention
from penstock_enginecore.forward.cuda.linear import Held
from penstock_enginecore.forward.cuda.mlp import MLP, GatedMLP, mlp_of
from penstock_enginecore.forward.cuda.plans import LatentPlan, LayerPlan, ModelPlan
from penstock_enginecore.forward.cuda.rotary import rotary_table
from penstock_enginecore.forward.proof import UnsuitableError

AfterLayer = Callable[[int, torch.Tensor], None]
"""Gets the number of a layer and what it put out, ``[tokens, hidden size]``; -1 and what the first one gets."""


@dataclass(frozen=True, slots=True)
class _Layer:
    plan: LayerPlan
    attention: Attention
    mlp: MLP

    @classmethod
    def of(cls, plan: LayerPlan, dtype: torch.dtype, kernels: Kernels, adapt: Adapt) -> "_Layer":
        mlp = mlp_of(plan.mlp, plan.residual_scale, kernels, adapt)
        return cls(plan, _attention_of(plan, dtype, kernels, adapt), mlp)

    @property
    def held(self) -> tuple[Held, ...]:
        return *self.attention.held, *self.mlp.held


def _attention_of(plan: LayerPlan, dtype: torch.dtype, kernels: Kernels, adapt: Adapt) -> Attention:
    if isinstance(plan.attention, LatentPlan):
        return LatentAttention.of(plan.attention, dtype, kernels, adapt)
    return HeadsAttention.of(plan.attention, kernels, adapt)


class Layers:
    """From token ids to what the last norm puts out. Merges the weights of the layers that ``plan`` names. Positions go up to
    ``max_len``. ``widths``: of what flows through. ``adapt``: products that adapters add to. Raises UnsuitableError.
    """

    def __init__(
        self, plan: ModelPlan, max_len: int, kernels: Kernels, device: torch.device, adapt: Adapt = unadapted
    ) -> None:
        self._rotary = [
            rotary_table(plan.rotary, max_len, device, *variant, twice=plan.rotary_twice)
            for variant in plan.rotary_variants
        ]
        self._plan = plan
        self._kernels = kernels
        self._layers = [_Layer.of(layer, plan.embedding.dtype, kernels, adapt) for layer in plan.layers]
        self.widths = self._widths()
        after = [layer.norms_before[0] for layer in plan.layers[1:]]
        self._next_norms = [*after, plan.norm]

    @property
    def held(self) -> list[Held]:
        """What products hold of the model's weights."""
        return [held for layer in self._layers for held in layer.held]

    def to(self, device: torch.device) -> None:
        """Move the products' weights, and the tables of positions."""
        for held in self.held:
            held.to(device)
        self._rotary = [table.to(device) for table in self._rotary]

    def embed(self, token_ids: torch.Tensor, out: torch.Tensor) -> None:
        """What the first layer gets for ``token_ids`` ``[tokens]`` into ``out`` ``[tokens, hidden size]``."""
        torch.index_select(self._plan.embedding, 0, token_ids, out=out)
        if self._plan.embedding_scale != 1.0:
            out.mul_(self._plan.embedding_scale)

    def scale_input(self, x: torch.Tensor) -> None:
        """What the first layer gets, ``[tokens, hidden size]``, in place, whether it came of tokens or not."""
        if self._plan.input_scale != 1.0:
            x.mul_(self._plan.input_scale)

    def run(
        self,
        inputs: StepInputs,
        activations: Activations,
        caches: Sequence[LayerCache],
        after_layer: AfterLayer | None = None,
    ) -> torch.Tensor:
        """From what stands in ``activations.residual``: what the last norm puts out, ``[tokens, hidden size]``."""
        kernels, residual = self._kernels, activations.residual
        self.scale_input(residual)
        if after_layer is not None:
            after_layer(-1, residual)
        x, spare = activations.normed, activations.x
        kernels.add_rms_norm(residual, None, self._layers[0].plan.norms_before[0], x)
        for i, (layer, cache, next_norm) in enumerate(zip(self._layers, caches, self._next_norms, strict=True)):
            plan = layer.plan
            after = plan.norms_after or (None, None)
            rotary = self._rotary[plan.attention.rotary]
            layer.attention.run(x, inputs, activations, cache, rotary, plan.residual_scale, spare)
            x, spare = self._add_norm(spare, x, residual, after[0], plan.norms_before[1])
            layer.mlp.run(x, inputs, activations, kernels, spare)
            x, spare = self._add_norm(spare, x, residual, after[1], next_norm)
            if after_layer is not None:
                after_layer(i, residual)
        return x

    def _add_norm(
        self, x: torch.Tensor, spare: torch.Tensor, residual: torch.Tensor, after: Norm | None, before: Norm
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``x``, normed by ``after`` where there is one, is added to ``residual``, and the sum normed by ``before``. Returns the
        norm, and what may be overwritten.
        """
        if after is not None:
            self._kernels.add_rms_norm(x, None, after, spare)
            x, spare = spare, x
        self._kernels.add_rms_norm(x, residual, before, spare)
        return spare, x

    def _widths(self) -> Widths:
        """Of what flows through them. UnsuitableError where layers differ."""
        found = {
            (layer.output.out_features, layer.first.out_features, layer.output.in_features)
            for layer in (each.attention for each in self._layers)
        }
        gated = {layer.mlp.down.in_features for layer in self._layers if isinstance(layer.mlp, GatedMLP)}
        if len(found) > 1 or len(gated) > 1:
            raise UnsuitableError("its layers are of different sizes")
        [(hidden, qkv, attended)] = found
        intermediate = gated.pop() if gated else 0
        return Widths(hidden, qkv, attended, intermediate, self._plan.head.out_features)
