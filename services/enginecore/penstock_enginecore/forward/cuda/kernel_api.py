"""What the fused decoder launches besides products: one call, one kernel (attention may take two).

The decoder knows this protocol only; the Triton kernels are one implementation of it, and tests have another in plain torch.
"""

from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from penstock_enginecore.attention.base import AttentionParams
from penstock_enginecore.attention.kv_cache import UNSCALED, KVScales
from penstock_enginecore.lora.device_slots import RowTiles, SlotMatrices
from penstock_enginecore.models.decoder_plan import Activation as Activation
from penstock_enginecore.models.decoder_plan import Norm as Norm

# Weights that stay quantized, as kernels read them: matrices, or those of experts, with the experts along a first dimension.

Kind = Literal["float8", "int4", "mxfp4"]
"""What tiles are chosen by."""


@dataclass(frozen=True, slots=True)
class Float8Weight:
    """``numbers`` e4m3 ``[out_features, in_features]``, of which those of a row and a block of ``width`` columns are multiplied
    by one of ``scales`` float32 ``[blocks, out_features]``.
    """

    numbers: torch.Tensor
    scales: torch.Tensor
    width: int
    kind: Kind = "float8"

    @property
    def in_features(self) -> int:
        """Numbers of a row."""
        return self.numbers.shape[-1]

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Numbers, scales."""
        return self.numbers, self.scales

    def to(self, device: torch.device) -> "Float8Weight":
        """The same on ``device``."""
        return Float8Weight(self.numbers.to(device), self.scales.to(device), self.width)


@dataclass(frozen=True, slots=True)
class Int4Weight:
    """Levels of 4 bits, two in a byte of ``numbers`` uint8 ``[out_features, in_features / 2]``: of each ``2 * half`` columns
    those of the first half in the lower bits. In a row and a block of ``width`` columns the level less one of ``zeros`` uint8,
    times one of ``scales``, both ``[blocks, out_features]``, is the weight.
    """

    numbers: torch.Tensor
    zeros: torch.Tensor
    scales: torch.Tensor
    width: int
    half: int
    kind: Kind = "int4"

    @property
    def in_features(self) -> int:
        """Numbers of a row."""
        return self.numbers.shape[-1] * 2

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Numbers, zeros, scales."""
        return self.numbers, self.zeros, self.scales

    def to(self, device: torch.device) -> "Int4Weight":
        """The same on ``device``."""
        numbers, zeros, scales = (tensor.to(device) for tensor in self.tensors)
        return Int4Weight(numbers, zeros, scales, self.width, self.half)


@dataclass(frozen=True, slots=True)
class Mxfp4Weight:
    """4-bit floats (e2m1), two in a byte of ``numbers`` uint8 ``[experts, out_features, in_features / 2]`` as the levels of
    ``Int4Weight`` are; in a row and a block of 32 columns times 2 to the power of one of ``exponents`` uint8 ``[experts,
    in_features / 32, out_features]``, less 127.
    """

    numbers: torch.Tensor
    exponents: torch.Tensor
    half: int
    kind: Kind = "mxfp4"

    @property
    def in_features(self) -> int:
        """Numbers of a row."""
        return self.numbers.shape[-1] * 2

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Numbers, exponents."""
        return self.numbers, self.exponents

    def to(self, device: torch.device) -> "Mxfp4Weight":
        """The same on ``device``."""
        return Mxfp4Weight(self.numbers.to(device), self.exponents.to(device), self.half)


QuantizedWeight = Float8Weight | Int4Weight
"""Of a linear layer."""
StackedWeight = Float8Weight | Int4Weight | Mxfp4Weight
"""Of experts."""


@dataclass(frozen=True, slots=True)
class RotaryTable:
    """Cosines and sines of all positions, float32 ``[max_len, rotary size / 2]``, scaling included. Number i of a head turns with
    number ``i + rotary size / 2``; numbers from the rotary size on are left alone.
    """

    cosines: torch.Tensor
    sines: torch.Tensor

    def to(self, device: torch.device) -> "RotaryTable":
        """The same on ``device``."""
        return RotaryTable(self.cosines.to(device), self.sines.to(device))


@dataclass(frozen=True, slots=True)
class GroupInputs:
    """Where the tokens of a step stand in the blocks of one KV cache group, on the device. Padded: requests that are not there
    have a ``seq_lens`` of 0 and no tokens, tokens behind ``query_start_loc[-1]`` a slot of -1.

    ``block_table`` int32 ``[requests, blocks]``, ``query_start_loc`` int32 ``[requests + 1]``, ``seq_lens`` int32 ``[requests]``,
    ``slots`` int64 ``[tokens]``. ``key_ends`` int32 ``[tokens]``: see ``AttentionMetadata``; None in steps that are captured.
    """

    block_table: torch.Tensor
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    slots: torch.Tensor
    key_ends: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class Draws:
    """What rows are drawn by, on the device, each ``[rows]``. ``temperature`` float32, 0 is greedy, others from 1e-30 to 1e30;
    ``seeds`` int64, the bits of a 64-bit seed; ``output_indices`` int64; ``max_distance`` float32 is ``-log(min_p)``, infinity
    where that is off; ``top_k`` int32, 0 is off; ``top_p`` float64, 1 is off.
    """

    temperature: torch.Tensor
    seeds: torch.Tensor
    output_indices: torch.Tensor
    max_distance: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor


class SamplingKernels(Protocol):
    """From logits to tokens on the device, of up to so many rows as there is memory for."""

    def sample(
        self,
        logits: torch.Tensor,
        draws: Draws | None,
        token_ids: torch.Tensor,
        peaks: torch.Tensor,
        num_nans: torch.Tensor,
        *,
        filtered: bool,
    ) -> None:
        """Write the token of each row of ``logits`` ``[rows, vocab]``, contiguous and of any float dtype, to ``token_ids`` int32
        ``[rows]``, its largest logit to ``peaks`` float32 ``[rows]``, and how many of its logits are NaN or infinity to
        ``num_nans`` int32 ``[rows]``. Rows whose peak is not finite are greedy, and all where there are no ``draws``.

        ``filtered``: whether any row has min_p, top_k or top_p; these are not looked at otherwise.
        """


class AttentionKernels(Protocol):
    """Attention over a paged cache, for queries, keys and values that something else has made."""

    def write(
        self,
        keys: torch.Tensor,
        values: torch.Tensor,
        slots: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        scales: KVScales = UNSCALED,
    ) -> None:
        """Put ``keys`` and ``values`` ``[tokens, kv_heads, head size]`` into ``slots`` (int64) of ``key_cache`` and
        ``value_cache`` ``[blocks, kv_heads, block_size, head size]``, in an fp8 cache divided by ``scales``. Nothing is written
        for a slot of -1.
        """

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
        """As that of ``Kernels``; the head sizes of ``values`` and ``out`` may be others than those of ``query`` and ``keys``."""


class LatentKernels(Protocol):
    """As ``Kernels``: each call launches work for every row, and waits for nothing.

    A token's ``cache`` ``[blocks, 1, block_size, latent + rotary size]`` is a latent, which is key and value of all heads, and
    numbers that turn, which are key alone. ``interleaved``: numbers 2i and 2i + 1 of a product turn together, not i and i + half
    the rotary size; they are written as if these did.
    """

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
        """From ``product`` ``[tokens, query numbers + latent + rotary size]``: add ``bias``, norm the latent and queries of low
        rank, where there are ``low`` ones ``[tokens, rank]`` to write these to (``norms``: of queries and of the latent), turn
        the rest by ``positions`` (int32), write latent and rest to ``slots`` (int64) of ``cache``. Nothing is written for a slot
        of -1.
        """

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
        """Turn the last numbers of the heads of ``product`` ``[tokens, heads, head size]`` and write them behind the latent of
        ``query`` ``[tokens, heads, latent + rotary size]``. Nothing is written for a slot of -1.
        """

    def attend_latent(
        self, query: torch.Tensor, cache: torch.Tensor, group: GroupInputs, scaling: float, out: torch.Tensor
    ) -> None:
        """Causal attention of ``query`` ``[tokens, heads, latent + rotary size]`` over what ``group`` says of ``cache`` into
        ``out`` ``[tokens, heads, latent]``. Rows of padding stay as they are.
        """


class LowRankKernels(Protocol):
    """What adapters add to a product."""

    def add_low_rank(
        self,
        x: torch.Tensor,
        matrices: SlotMatrices,
        tiles: RowTiles,
        scratch: torch.Tensor,
        scale: float,
        out: torch.Tensor,
    ) -> None:
        """Add to ``out`` ``[rows, out features]`` what ``matrices`` make of ``x`` ``[rows, in features]``, times ``scale``, for
        the rows of ``tiles``; others are not touched. ``scratch``: float32, ``SlotMatrices.scratch_numbers``. A row's bits depend
        on nothing beside it.
        """


class Kernels(LatentKernels, LowRankKernels, Protocol):
    """Each call launches work for every row it is given, in order, and waits for nothing: no read on the host, and no shape that
    depends on a number on the device. So a sequence of calls can be captured and replayed.

    ``batch_invariant``: a row's results have the same bits whatever is computed beside it, in steps of whatever size.
    """

    batch_invariant: bool

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
        """From the product ``qkv`` ``[tokens, (heads + 2 * kv_heads) * head size]``: add ``bias``, norm each query and key head
        (``norms``: of queries and of keys), turn them by their ``positions`` (int32), write keys and values to ``slots`` of a
        layer's ``keys`` and ``values`` ``[blocks, kv_heads, block_size, head size]`` and the queries to ``query``
        ``[tokens, heads, head size]``. Nothing is written for a slot of -1. ``scales``: of an fp8 cache.
        """

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
        """Causal attention of ``query`` ``[tokens, heads, head size]`` over what ``group`` says into ``out``, of its shape. Rows
        of padding stay as they are. ``scales``: of an fp8 cache.
        """

    def add_rms_norm(self, x: torch.Tensor, residual: torch.Tensor | None, norm: Norm, out: torch.Tensor) -> None:
        """Where there is a ``residual`` add ``x`` to it, in its place and dtype; write the norm of the sum, or of ``x``, to
        ``out``. All ``[tokens, hidden size]``, ``out`` apart from the others.
        """

    def gated(self, gate_up: torch.Tensor, activation: Activation, out: torch.Tensor) -> None:
        """From ``gate_up`` ``[tokens, 2 * intermediate size]``, ``activation`` of the first half times the second into ``out``
        ``[tokens, intermediate size]``.
        """

    def quantized_product(
        self, x: torch.Tensor, weight: QuantizedWeight, bias: torch.Tensor | None, scale: float, out: torch.Tensor
    ) -> None:
        """``x`` ``[rows, in_features]`` times ``weight``, with the ``bias`` where there is one, times ``scale``, into ``out``
        ``[rows, out_features]``.
        """

    def product(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, scale: float, out: torch.Tensor
    ) -> None:
        """As ``quantized_product``, with ``weight`` ``[out_features, in_features]`` as it is; batch-invariant."""

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
        """Each expert's rows of ``x`` ``[rows, in_features]``, which end where ``ends`` int32 ``[experts]`` says, times its part
        of ``weight`` ``[experts, out_features, in_features]``, of ``transposed`` ones ``[experts, in_features, out_features]``,
        with its part of ``bias`` ``[experts, out_features]``, into ``out`` ``[rows, out_features]``; rows behind stay as they
        are. Batch-invariant.
        """

    def quantized_grouped_product(
        self, x: torch.Tensor, weight: StackedWeight, bias: torch.Tensor | None, ends: torch.Tensor, out: torch.Tensor
    ) -> None:
        """As ``grouped_product``, with experts' weights that stay quantized."""

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
        """Rows ``places`` int64 ``[tokens, top_k]`` of ``x``, each times its ``weights`` float32 ``[tokens, top_k]`` and
        ``scale``, summed in their order into ``out`` ``[tokens, width]``. Weights are divided by their sum if ``renormalize``.
        """
