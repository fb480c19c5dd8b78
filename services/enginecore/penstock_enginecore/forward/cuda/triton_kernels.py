"""Triton kernels for the fused decoder, paged attention and LoRA adapters.

``TritonKernels`` exposes the functions that launch kernels under the names that callers use. These functions are
documented in their modules.
"""

from functools import partial

import torch

from penstock_enginecore.attention.base import AttentionParams
from penstock_enginecore.attention.kv_cache import UNSCALED, KVScales
from penstock_enginecore.forward.cuda.buffers import MAX_CAPTURED_TOKENS
from penstock_enginecore.forward.cuda.kernel_api import GroupInputs, Routing, Scratch
from penstock_enginecore.forward.cuda.kernels import (
    activation,
    attention,
    cache,
    grouped,
    invariant,
    mixture,
    norm,
    quantized,
    router,
    scaled,
)
from penstock_enginecore.forward.cuda.kernels import latent_attention as latent
from penstock_enginecore.forward.cuda.kernels import prologue as heads
from penstock_enginecore.forward.cuda.kernels.dependent_launch import supports_pdl
from penstock_enginecore.lora import triton as lora


class TritonKernels:
    """Launches kernels of one device.

    A call launches its work and returns without waiting. The host reads no results, and no tensor shape depends on a
    value on the device. Therefore a CUDA graph can capture and replay a sequence of calls.

    If ``batch_invariant`` is true, the results of a row are bit-identical in every batch and in steps of any size. If
    ``rounds_activations`` is true, products of many rows may round activations to 8-bit floats. If
    ``dependent_launch`` is true and the device supports PDL, most kernels of layers are launched with PDL; see
    ``kernels/dependent_launch.py``. All attention calls use the same scratch memory, because layers and steps run one
    after the other.
    """

    write = staticmethod(cache.write_cache)
    route = staticmethod(mixture.route)
    align = staticmethod(mixture.align)
    weighted_sum = staticmethod(mixture.weighted_sum)
    dequantize = staticmethod(quantized.dequantize)
    scaled_product = staticmethod(scaled.scaled_product)
    add_low_rank = staticmethod(lora.add_low_rank)

    def __init__(self, *, batch_invariant: bool = False, dependent_launch: bool = False) -> None:
        self.batch_invariant = batch_invariant
        pdl = self._pdl = dependent_launch and supports_pdl()
        self.prologue = partial(heads.prologue, pdl=pdl)
        self.latent_prologue = partial(latent.latent_prologue, pdl=pdl)
        self.turn_queries = partial(latent.turn_queries, pdl=pdl)
        self.add_rms_norm = partial(norm.add_rms_norm, pdl=pdl)
        self.gated = partial(activation.gated, pdl=pdl)
        self.product = partial(invariant.invariant_product, pdl=pdl)
        self.rounds_activations = False
        self.quantized_product = partial(quantized.quantized_product, invariant=batch_invariant, pdl=pdl)
        self.grouped_product = partial(grouped.grouped_product, invariant=batch_invariant)
        self.quantized_grouped_product = partial(quantized.quantized_grouped_product, invariant=batch_invariant)
        self._scratch: dict[tuple[int, int, int, bool], list[Scratch]] = {}
        self._counters: dict[torch.device, torch.Tensor] = {}

    def assign(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        correction: torch.Tensor | None,
        starts: torch.Tensor,
        routing: Routing,
        weights: torch.Tensor,
        ends: torch.Tensor,
        order: torch.Tensor,
    ) -> None:
        """Choose and order experts with ``router.assign``. All layers and steps use the same counters."""
        counters = self._counters.get(x.device)
        if counters is None:
            counters = self._counters[x.device] = torch.zeros(router.COUNTERS, dtype=torch.int32, device=x.device)
        router.assign(x, weight, bias, correction, starts, routing, weights, ends, order, counters)

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
        """Compute attention with ``attention.attend``, except for requests that a library computes. All layers and steps
        use the same scratch memory.
        """
        if group.prompts is not None:
            rest = group.prompts.attend(query, keys, values, group, params, out, scales)
            if rest is None:
                return
            group = rest
        scratch = self._scratch_for(self._queries(query, group), attention.pieces_per_request(keys.shape[1]), out)
        attention.attend(
            query, keys, values, out, group, params, scratch, scales, invariant=self.batch_invariant, pdl=self._pdl
        )

    def attend_latent(
        self, query: torch.Tensor, cache: torch.Tensor, group: GroupInputs, scaling: float, out: torch.Tensor
    ) -> None:
        """Compute latent attention with ``latent_attention.attend_latent``. All layers and steps use the same scratch
        memory.
        """
        scratch = self._scratch_for(self._queries(query, group), latent.latent_pieces(query.shape[1]), out)
        latent.attend_latent(query, cache, group, scaling, out, scratch, invariant=self.batch_invariant, pdl=self._pdl)

    def _queries(self, query: torch.Tensor, group: GroupInputs) -> int:
        """Return the number of queries with scratch memory: one per request, and in steps that are not only decodes the
        new tokens of one more request, up to ``MAX_CAPTURED_TOKENS``.
        """
        requests = len(group.seq_lens)
        if self.batch_invariant or group.decodes_only:
            return requests
        return max(requests, min(len(query), requests + attention.LONGEST_SPLIT, MAX_CAPTURED_TOKENS))

    def _scratch_for(self, queries: int, pieces: int, out: torch.Tensor) -> Scratch:
        """Return scratch memory for attention whose output is ``out``.

        The scratch memory has space for as many queries as the largest step so far, rounded up. Captured graphs
        contain addresses of the scratch memory, so scratch memory of captured steps stays allocated when a larger step
        needs more. Steps that are too large to be captured share other scratch memory, which grows.
        """
        shape = pieces, out.shape[1], out.shape[2]
        is_large = queries > MAX_CAPTURED_TOKENS
        held = self._scratch.setdefault((*shape, is_large), [])
        if not held or len(held[-1].total) < queries:
            if is_large:
                held.clear()
            held.append(Scratch.allocate(_rounded(queries), *shape, out.device))
        return held[-1]


def _rounded(queries: int) -> int:
    """Return ``queries`` rounded up to a power of two of at least 16, so that slowly growing steps do not allocate each
    time.
    """
    return max(16, 1 << (queries - 1).bit_length())
