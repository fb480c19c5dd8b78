"""What kernels are given: weights that stay quantized, norms, rotary tables, where a step's tokens stand, and how rows are drawn.

``triton_kernels.py`` has the kernels. Tests have the same calls in plain torch.
"""

from dataclasses import dataclass
from typing import Literal

import torch

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
    width: int = 32

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
