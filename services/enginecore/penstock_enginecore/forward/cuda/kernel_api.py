"""Data types for kernel arguments: quantized weights, norms, rotary tables, a step's positions in the cache, scratch
memory of attention, the choice of experts, and sampling parameters.

The kernels are in ``triton_kernels.py``. The tests contain the same functions in plain torch.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

import torch

from penstock_enginecore.attention.base import AttentionParams
from penstock_enginecore.attention.kv_cache import KVScales
from penstock_enginecore.models.decoder_plan import Activation as Activation
from penstock_enginecore.models.decoder_plan import ClampedGate as ClampedGate
from penstock_enginecore.models.decoder_plan import Norm as Norm

# Weights that stay quantized, in the kernels' layout (``packing.py``). Experts' weights have an additional first
# dimension.

Kind = Literal["float8", "int4", "mxfp4"]
"""Format of a weight. Kernels choose their tile sizes by this format."""


@dataclass(frozen=True, slots=True)
class Float8Weight:
    """Weight of a linear layer in 8-bit floats.

    Attributes:
        numbers: int16 ``[out_features, in_features / 2]``, two e4m3 elements per word.
        scales: float32 ``[blocks, out_features]``, a factor for each row of each block of ``width`` columns.
        width: Number of columns of a block.
        part: Distance between the two columns that share a word.
    """

    numbers: torch.Tensor
    scales: torch.Tensor
    width: int
    part: int
    kind: Kind = "float8"

    @property
    def in_features(self) -> int:
        """Number of elements of an input row."""
        return self.numbers.shape[-1] * 2

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The elements and scales."""
        return self.numbers, self.scales

    def to(self, device: torch.device) -> "Float8Weight":
        """Return the weight on ``device``."""
        return Float8Weight(self.numbers.to(device), self.scales.to(device), self.width, self.part)


@dataclass(frozen=True, slots=True)
class Int4Weight:
    """Weight of a linear layer in 4-bit integers, called levels. An element is its level minus its zero point, times
    its scale.

    Attributes:
        numbers: int16 ``[out_features, words]``, four levels per word.
        zeros: uint8 ``[blocks, out_features]``, the zero point for each row of each block of ``width`` columns.
        scales: ``[blocks, out_features]``, the scale for each row of each block of ``width`` columns.
        width: Number of columns of a block.
        part: Distance between neighbours of the four columns that share a word.
        in_features: Number of elements of an input row.
    """

    numbers: torch.Tensor
    zeros: torch.Tensor
    scales: torch.Tensor
    width: int
    part: int
    in_features: int
    kind: Kind = "int4"

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The levels, zero points and scales."""
        return self.numbers, self.zeros, self.scales

    def to(self, device: torch.device) -> "Int4Weight":
        """Return the weight on ``device``."""
        numbers, zeros, scales = (tensor.to(device) for tensor in self.tensors)
        return Int4Weight(numbers, zeros, scales, self.width, self.part, self.in_features)


@dataclass(frozen=True, slots=True)
class Mxfp4Weight:
    """Weight of all experts in 4-bit floats (e2m1), with one exponent per row of each block of 32 columns.

    Attributes:
        numbers: int16 ``[experts, out_features, words]``, four elements per word.
        exponents: uint8 ``[experts, in_features / 32, out_features]``. The factor is 2 to the power of the exponent minus 127.
        part: Distance between neighbours of the four columns that share a word.
        in_features: Number of elements of an input row.
    """

    numbers: torch.Tensor
    exponents: torch.Tensor
    part: int
    in_features: int
    kind: Kind = "mxfp4"
    width: int = 32

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The elements and exponents."""
        return self.numbers, self.exponents

    def to(self, device: torch.device) -> "Mxfp4Weight":
        """Return the weight on ``device``."""
        return Mxfp4Weight(self.numbers.to(device), self.exponents.to(device), self.part, self.in_features)


QuantizedWeight = Float8Weight | Int4Weight
"""Quantized weight of one linear layer."""
StackedWeight = Float8Weight | Int4Weight | Mxfp4Weight
"""Quantized weight of all experts of a layer."""


@dataclass(frozen=True, slots=True)
class RotaryTable:
    """Cosines and sines of all positions for rotary embeddings, float32 ``[max_len, rotary size / 2]``, multiplied by
    the model's scaling factor.

    Element i of a head is rotated with element ``i + rotary size / 2``. Elements from the rotary size on are unchanged.
    """

    cosines: torch.Tensor
    sines: torch.Tensor

    def to(self, device: torch.device) -> "RotaryTable":
        """Return the table on ``device``."""
        return RotaryTable(self.cosines.to(device), self.sines.to(device))


class LongPrompts(Protocol):
    """Requests of a step whose attention a library computes in place of the kernels."""

    def attend(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        group: "GroupInputs",
        params: AttentionParams,
        out: torch.Tensor,
        scales: KVScales,
    ) -> "GroupInputs | None":
        """Compute attention of these requests into ``out``, if the library supports the layer. The arguments are those
        of ``TritonKernels.attend``.

        Returns the inputs for the kernels, in which the requests that the library has computed have length 0, or None
        if the kernels have nothing to compute.
        """


@dataclass(frozen=True, slots=True)
class GroupInputs:
    """Positions of a step's tokens in one KV cache group, on the device.

    Padding requests have no tokens and a ``seq_lens`` of 0. Kernels skip requests with a ``seq_lens`` of 0. Padding
    tokens (indices from ``query_start_loc[-1]`` on) have slot -1.

    Attributes:
        block_table: int32 ``[requests, blocks]``.
        query_start_loc: int32 ``[requests + 1]``.
        seq_lens: int32 ``[requests]``.
        slots: int64 ``[tokens]``.
        key_ends: int32 ``[tokens]``, see ``AttentionMetadata``. Captured steps have None.
        windowed_ends: Whether ``key_ends`` applies only to layers with a sliding window.
        decodes_only: Whether each request has exactly one new token, except padding requests, which are the last. Then
            attention needs fewer kernels. Captured steps of both kinds have separate graphs.
        prompts: Requests whose attention a library computes, or None. Captured steps have None.
    """

    block_table: torch.Tensor
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    slots: torch.Tensor
    key_ends: torch.Tensor | None = None
    windowed_ends: bool = False
    decodes_only: bool = False
    prompts: LongPrompts | None = None

    def for_window(self, sliding_window: int | None) -> "GroupInputs":
        """Return the inputs for a layer with this sliding window, or without one."""
        drops = self.key_ends is not None and self.windowed_ends and sliding_window is None
        return replace(self, key_ends=None) if drops else self


@dataclass(frozen=True, slots=True)
class Scratch:
    """Intermediate results, float32, for each piece of keys of each query whose keys are split.

    Attributes:
        sums: ``[queries, pieces, heads, head size]``, weighted sums of the values.
        largest: ``[queries, pieces, heads]``, the largest attention scores.
        total: ``[queries, pieces, heads]``, sums of the softmax weights.
    """

    sums: torch.Tensor
    largest: torch.Tensor
    total: torch.Tensor

    @classmethod
    def allocate(cls, queries: int, pieces: int, heads: int, head_size_v: int, device: torch.device) -> "Scratch":
        """Return scratch memory for ``queries`` queries, at least one per request, with ``pieces`` pieces of keys each."""
        shape = (queries, pieces, heads)
        sums = torch.empty(*shape, head_size_v, dtype=torch.float32, device=device)
        return cls(sums, *torch.empty(2, *shape, dtype=torch.float32, device=device))


@dataclass(frozen=True, slots=True)
class MediaInputs:
    """Inputs that only steps with images, video or sound have.

    Attributes:
        rotary: Rotary tables of the model's variants, with a row for each token of the step. ``StepInputs.positions``
            are then indices of these rows. None for the model's own tables.
        deepstack: See ``ForwardBatch``. None if the step has no such embeddings.
    """

    rotary: Sequence[RotaryTable] | None = None
    deepstack: torch.Tensor | None = None


# Mixtures of experts.


@dataclass(frozen=True, slots=True)
class Routing:
    """Choice of a token's ``top_k`` experts, and their weights.

    Attributes:
        renormalize: Whether the weights of a token are divided by their sum.
        scale: Factor of the weights.
        sigmoid: Whether the score of an expert is the sigmoid of its logit, and not its probability.
        groups: Number of groups of consecutive experts.
        kept: Number of groups with the largest scores. Only their experts can be chosen.
        counted: Number of a group's best scores, 1 or 2, whose sum is the score of the group.
        float32: Whether logits are float32. Otherwise they have the model's dtype.
    """

    top_k: int
    renormalize: bool
    scale: float
    sigmoid: bool = False
    groups: int = 1
    kept: int = 1
    counted: int = 1
    float32: bool = False


MAX_ASSIGNED_TOKENS = 64
MAX_ASSIGNED_PAIRS = 512
"""Largest numbers of tokens, and of pairs of tokens and experts, for which one kernel computes the whole router."""
MAX_ASSIGNED_EXPERTS = 512


@dataclass(frozen=True, slots=True)
class ExpertRows:
    """Rows of a step in the order of their experts. A row is a pair of a token and one of its ``top_k`` experts; see
    ``kernels/mixture.py``.

    Attributes:
        ends: int32 ``[experts]``, the end of each expert's rows. Rows after the last end belong to no expert.
        order: int32 ``[rows]``, the index of the pair of each row, ``token * top_k + i``.
        top_k: Number of experts per token.
    """

    ends: torch.Tensor
    order: torch.Tensor
    top_k: int


@dataclass(frozen=True, slots=True)
class SharedProduct:
    """Product of a shared MLP, which the launch of a product of experts computes too. It has the same activation.

    Attributes:
        x: ``[tokens, in_features]``.
        weight: ``[out_features, in_features]``.
        out: ``[tokens, out_features]``, or ``[tokens, out_features / 2]`` with an activation.
    """

    x: torch.Tensor
    weight: torch.Tensor
    out: torch.Tensor

    def check(self, *, activated: bool) -> None:
        """Raise ValueError if the shapes do not fit, or if a tensor is not contiguous."""
        (tokens, in_features), (out_features, columns) = self.x.shape, self.weight.shape
        tensors = self.x, self.weight, self.out
        width = out_features // 2 if activated else out_features
        if columns != in_features or self.out.shape != (tokens, width):
            shapes = ", ".join(str(list(each.shape)) for each in tensors)
            raise ValueError(f"shapes of the shared product do not match: {shapes}")
        if not all(tensor.is_contiguous() for tensor in tensors):
            raise ValueError("all tensors of a matrix product must be contiguous")


@dataclass(frozen=True, slots=True)
class WeightedRows:
    """Output of a mixture of experts before the sum over each token's experts.

    Attributes:
        rows: ``[tokens * top_k, width]``, one row for each pair of a token and an expert.
        weights: float32 ``[tokens, top_k]``, weights of these rows.
        shared: ``[tokens, width]``, added to the sum, or None.
    """

    rows: torch.Tensor
    weights: torch.Tensor
    shared: torch.Tensor | None

    @property
    def shape(self) -> torch.Size:
        """Shape of the sum, ``[tokens, width]``."""
        return torch.Size((self.weights.shape[0], self.rows.shape[1]))

    def check(self) -> None:
        """Raise ValueError if the shapes do not fit, or if a tensor is not contiguous."""
        tokens, top_k = self.weights.shape
        tensors = [self.rows, self.weights, *([] if self.shared is None else [self.shared])]
        if len(self.rows) != tokens * top_k or (self.shared is not None and self.shared.shape != self.shape):
            raise ValueError("shapes do not match: " + ", ".join(str(list(each.shape)) for each in tensors))
        if not all(tensor.is_contiguous() for tensor in tensors):
            raise ValueError("all tensors of a mixture of experts must be contiguous")


MAX_SCORED = 20
"""Maximum number of likeliest tokens whose log-probabilities the kernels compute."""


@dataclass(frozen=True, slots=True)
class Draws:
    """Sampling parameters of rows of logits, as tensors ``[rows]`` on the device.

    Attributes:
        temperature: float32, 0 for greedy, otherwise from 1e-30 to 1e30.
        seeds: int64, the bits of an unsigned 64-bit seed.
        output_indices: int64, the index in the request's output of the token to sample.
        max_distance: float32, ``-log(min_p)``, or infinity for no limit.
        top_k: int32, 0 for no limit.
        top_p: float64, 1 for no limit.
    """

    temperature: torch.Tensor
    seeds: torch.Tensor
    output_indices: torch.Tensor
    max_distance: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
