"""The launches of the fused decoder by the Triton kernels."""

import torch

from penstock_enginecore.attention.base import AttentionParams
from penstock_enginecore.attention.kv_cache import UNSCALED, KVScales
from penstock_enginecore.forward.cuda.buffers import MAX_CAPTURED_TOKENS
from penstock_enginecore.forward.cuda.kernel_api import (
    Activation,
    GroupInputs,
    Int4Weight,
    Norm,
    QuantizedWeight,
    RotaryTable,
    StackedWeight,
)
from penstock_enginecore.forward.cuda.kernels.activation import gated
from penstock_enginecore.forward.cuda.kernels.attention import Scratch, attend
from penstock_enginecore.forward.cuda.kernels.cache import write_cache
from penstock_enginecore.forward.cuda.kernels.experts import quantized_grouped_product
from penstock_enginecore.forward.cuda.kernels.invariant import (
    invariant_grouped_product,
    invariant_product,
    weighted_sum,
)
from penstock_enginecore.forward.cuda.kernels.latent_attention import (
    attend_latent,
    latent_prologue,
    latent_scratch,
    turn_queries,
)
from penstock_enginecore.forward.cuda.kernels.norm import add_rms_norm
from penstock_enginecore.forward.cuda.kernels.prologue import prologue
from penstock_enginecore.forward.cuda.kernels.quantized import float8_product, int4_product
from penstock_enginecore.lora.device_slots import RowTiles, SlotMatrices
from penstock_enginecore.lora.triton import add_low_rank


class TritonKernels:
    """A ``Kernels`` and an ``AttentionKernels``. What decodes leave between two kernels has memory of its own: layers and steps
    run one after the other. ``batch_invariant``: see ``Kernels``.
    """

    def __init__(self, *, batch_invariant: bool = False) -> None:
        self.batch_invariant = batch_invariant
        self._scratch: dict[tuple[int, int, int, bool], Scratch] = {}
        self._latent_scratch: dict[tuple[int, int, bool], Scratch] = {}

    def prologue(
        self,
        qkv: torch.Tensor,
        bias: torch.Tensor | None,
        norms: tuple[Norm, Norm] | None,
        rotary: RotaryTable,
        positions: torch.Tensor,
        slots: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        query: torch.Tensor,
        scales: KVScales = UNSCALED,
    ) -> None:
        """One kernel."""
        prologue(qkv, bias, norms, rotary, positions, slots, keys, values, query, scales=scales)

    def write(
        self,
        keys: torch.Tensor,
        values: torch.Tensor,
        slots: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        scales: KVScales = UNSCALED,
    ) -> None:
        """One kernel."""
        write_cache(keys, values, slots, key_cache, value_cache, scales)

    def attend(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        group: GroupInputs,
        params: AttentionParams,
        out: torch.Tensor,
        scales: KVScales = UNSCALED,
    ) -> None:
        """Decodes in pieces of the keys, their merge, and tiles of the requests with several new tokens, or all in tiles."""
        scratch = self._scratch_for(len(group.seq_lens), query.shape[1], keys.shape[1], out)
        attend(query, keys, values, out, group, params, scratch, scales, invariant=self.batch_invariant)

    def latent_prologue(
        self,
        product: torch.Tensor,
        bias: torch.Tensor | None,
        norms: tuple[Norm | None, Norm],
        rotary: RotaryTable,
        positions: torch.Tensor,
        slots: torch.Tensor,
        cache: torch.Tensor,
        low: torch.Tensor | None,
        *,
        interleaved: bool,
    ) -> None:
        """One kernel."""
        latent_prologue(product, bias, norms, rotary, positions, slots, cache, low, interleaved=interleaved)

    def turn_queries(
        self,
        product: torch.Tensor,
        rotary: RotaryTable,
        positions: torch.Tensor,
        slots: torch.Tensor,
        query: torch.Tensor,
        *,
        interleaved: bool,
    ) -> None:
        """One kernel."""
        turn_queries(product, rotary, positions, slots, query, interleaved=interleaved)

    def attend_latent(
        self, query: torch.Tensor, cache: torch.Tensor, group: GroupInputs, scaling: float, out: torch.Tensor
    ) -> None:
        """As ``attend``."""
        scratch = self._latent_scratch_for(len(group.seq_lens), query.shape[1], out)
        attend_latent(query, cache, group, scaling, out, scratch, invariant=self.batch_invariant)

    def add_rms_norm(self, x: torch.Tensor, residual: torch.Tensor | None, norm: Norm, out: torch.Tensor) -> None:
        """One kernel."""
        add_rms_norm(x, residual, norm, out)

    def gated(self, gate_up: torch.Tensor, activation: Activation, out: torch.Tensor) -> None:
        """One kernel."""
        gated(gate_up, activation, out)

    def quantized_product(
        self, x: torch.Tensor, weight: QuantizedWeight, bias: torch.Tensor | None, scale: float, out: torch.Tensor
    ) -> None:
        """One kernel."""
        if isinstance(weight, Int4Weight):
            int4_product(x, weight, bias, scale, out, invariant=self.batch_invariant)
        else:
            float8_product(x, weight, bias, scale, out, invariant=self.batch_invariant)

    def product(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, scale: float, out: torch.Tensor
    ) -> None:
        """One kernel."""
        invariant_product(x, weight, bias, scale, out)

    def grouped_product(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        ends: torch.Tensor,
        out: torch.Tensor,
        *,
        transposed: bool,
    ) -> None:
        """One kernel."""
        invariant_grouped_product(x, weight, bias, ends, out, transposed=transposed)

    def quantized_grouped_product(
        self, x: torch.Tensor, weight: StackedWeight, bias: torch.Tensor | None, ends: torch.Tensor, out: torch.Tensor
    ) -> None:
        """One kernel."""
        quantized_grouped_product(x, weight, bias, ends, out, invariant=self.batch_invariant)

    def weighted_sum(
        self,
        x: torch.Tensor,
        places: torch.Tensor,
        weights: torch.Tensor,
        scale: float,
        out: torch.Tensor,
        *,
        renormalize: bool,
    ) -> None:
        """One kernel."""
        weighted_sum(x, places, weights, scale, out, renormalize=renormalize)

    def add_low_rank(
        self,
        x: torch.Tensor,
        matrices: SlotMatrices,
        tiles: RowTiles,
        scratch: torch.Tensor,
        scale: float,
        out: torch.Tensor,
    ) -> None:
        """Two kernels."""
        add_low_rank(x, matrices, tiles, scratch, scale, out)

    def _scratch_for(self, requests: int, heads: int, kv_heads: int, out: torch.Tensor) -> Scratch:
        """Of captured steps all have the same, which never moves; larger ones share another, which grows."""
        shape = heads, kv_heads, out.shape[2]
        key = (*shape, requests > MAX_CAPTURED_TOKENS)
        if key not in self._scratch or len(self._scratch[key].total) < requests:
            self._scratch[key] = Scratch.allocate(max(requests, MAX_CAPTURED_TOKENS), *shape, out.device)
        return self._scratch[key]

    def _latent_scratch_for(self, requests: int, heads: int, out: torch.Tensor) -> Scratch:
        """As ``_scratch_for``."""
        key = heads, out.shape[2], requests > MAX_CAPTURED_TOKENS
        if key not in self._latent_scratch or len(self._latent_scratch[key].total) < requests:
            self._latent_scratch[key] = latent_scratch(
                max(requests, MAX_CAPTURED_TOKENS), heads, out.shape[2], out.device
            )
        return self._latent_scratch[key]
