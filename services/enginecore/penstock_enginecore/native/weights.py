"""Weights in the kernels' layout: panels of as many rows as two vectors have lanes (``csrc/gemm.h``)."""

import ctypes
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812

from penstock_enginecore.huge_pages import huge_empty
from penstock_enginecore.models.dtypes import NarrowWeight, widened
from penstock_enginecore.native.ffi_structs import Linear
from penstock_enginecore.native.library import NativeLibrary

# Weights rounded to 8-bit integers with a factor per row. A decode step on a CPU takes about as long as reading the
# weights.
#
# A rounded weight is still a dense weight, so any code, including transformers' modules, computes with the rounded
# values. The CPU kernels detect that its rows are integers times a factor, and store the integers.

_LARGEST = 127
_CUT = 0xFF
"""Bits of a scale that are zero. The remaining 16 significant bits make the product of the scale and an integer exact
in float32.
"""


@dataclass(frozen=True, slots=True)
class Int8Weight:
    """Weight that equals ``numbers`` int8 ``[n, k]`` times ``scales`` float32 ``[n]`` bit by bit."""

    numbers: torch.Tensor
    scales: torch.Tensor


def round_to_int8(weight: torch.Tensor) -> torch.Tensor:
    """Return a float32 weight ``[n, k]`` with each row rounded to multiples of 1/127 of its largest element. The error
    is at most half a step.
    """
    scales = _up((weight.abs().amax(1, keepdim=True) / _LARGEST).clamp(min=torch.finfo(torch.float32).tiny))
    return (weight / scales).round() * scales


def as_int8(weight: torch.Tensor) -> Int8Weight | None:
    """Return integers and scales of a float32 weight ``[n, k]`` that was rounded, or None for other weights."""
    if not weight.numel() or _exactly(weight[:1]) is None:
        return None
    return _exactly(weight)


def round_linears(module: torch.nn.Module, *, but: torch.nn.Module | None = None) -> float:
    """Round the weights of all linear layers except the layer ``but``, to new float32 weights.

    Returns the largest error of a layer, relative to the norm of its weight.
    """
    worst = 0.0
    for layer in module.modules():
        if type(layer) is not torch.nn.Linear or layer is but:
            continue
        weight: Any = layer.weight.detach()
        rounded = round_to_int8(weight)
        worst = max(worst, float((rounded - weight).norm() / weight.norm().clamp(min=torch.finfo(torch.float32).tiny)))
        layer.weight = torch.nn.Parameter(rounded, requires_grad=False)
    return worst


def _up(scales: torch.Tensor) -> torch.Tensor:
    return ((scales.view(torch.int32) + _CUT) & ~_CUT).view(torch.float32)


def _exactly(weight: torch.Tensor) -> Int8Weight | None:
    scales = weight.abs().amax(1, keepdim=True) / _LARGEST
    numbers = (weight / scales).nan_to_num(0.0).round()  # a row of zeros has no scale
    if not torch.equal(numbers * scales, weight):
        return None
    return Int8Weight(numbers.to(torch.int8), scales[:, 0].contiguous())


_PIECE = 4 * 1024 * 1024
"""Number of elements that are packed at a time."""
VECTORS = 64
"""Number of elements: a multiple of the number that torch's vectorized loops process at a time."""
KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}
"""Numbers of weight dtypes in the kernels' interface."""


class PackedWeight:
    """Packed weight ``[n, k]`` and bias ``[n]``. ``struct`` points into their memory.

    A weight whose elements bfloat16 represents exactly is stored as bfloat16. A weight whose rows are 8-bit integers
    times a factor is stored as integers. This needs half or a quarter of the memory, and of the time to read the
    memory.
    """

    def __init__(
        self,
        library: NativeLibrary,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        *,
        half: bool | None = None,
    ) -> None:
        """Pack a weight. ``half`` selects bfloat16 or float32 if the caller knows which dtype fits. None detects the
        dtype.
        """
        look = half is None
        self.dtype = torch.bfloat16 if half or (look and fits_bfloat16(weight)) else torch.float32
        self.n, self.k = weight.shape
        padding = -self.n % (2 * library.lanes)
        self._scales: torch.Tensor | None = None
        if look and (integers := as_int8(weight)) is not None:
            self.dtype = torch.int8
            weight = integers.numbers
            self._scales = F.pad(integers.scales, (0, padding))
        kind = KINDS[self.dtype]
        self._filled_to = library.filled_to(kind)
        self._packed = huge_empty((self.n + padding) * (self.k + -self.k % self._filled_to), dtype=self.dtype)
        self._bias = None if bias is None else widened(bias.detach()).float().clone()
        scales, bias_pointer = (None if part is None else part.data_ptr() for part in (self._scales, self._bias))
        self.struct = Linear(self._packed.data_ptr(), scales, bias_pointer, self.n, self.k, kind, library.parts)
        self.pointer = ctypes.addressof(self.struct)
        self._pack(library, weight)

    def overwrite(self, library: NativeLibrary, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        """Replace the weight and bias by values of the same shapes. Raises ValueError if the values need another dtype."""
        self._check(weight, bias)
        self._pack(library, weight)
        if self._bias is not None and bias is not None:
            self._bias.copy_(bias)

    def like(self, library: NativeLibrary, weight: torch.Tensor, bias: torch.Tensor | None = None) -> "PackedWeight":
        """Return another weight, packed in the same format. Raises like ``overwrite``."""
        self._check(weight, bias)
        return PackedWeight(library, weight, bias, half=self.dtype == torch.bfloat16)

    def _pack(self, library: NativeLibrary, weight: torch.Tensor) -> None:
        """Pack a few panels at a time, so that there is never a full copy as floats."""
        panel, of = 2 * library.lanes, self.struct
        row_bytes = (self.k + -self.k % self._filled_to) * self.dtype.itemsize
        step = max(_PIECE // (panel * max(self.k, 1)), 1) * panel
        for first in range(0, self.n, step):
            rows = widened(weight.detach()[first : first + step]).float().contiguous()
            piece = Linear(of.packed + first * row_bytes, None, None, len(rows), self.k, of.kind, of.parts)
            library.call("pack", rows.data_ptr(), ctypes.addressof(piece))

    def _check(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        if self.dtype != torch.float32 and not (self.dtype == torch.bfloat16 and fits_bfloat16(weight)):
            raise ValueError(
                f"{str(self.dtype).removeprefix('torch.')} does not represent every element of the weight exactly"
            )
        if weight.shape != (self.n, self.k) or (bias is None) != (self._bias is None):
            raise ValueError(
                f"a weight of shape {list(weight.shape)} does not fit a packed weight of shape [{self.n}, {self.k}]"
            )

    @property
    def layout(self) -> str:
        """Name of the format. Weights of equal shape and layout have interchangeable memory, between libraries with the
        same lanes.
        """
        return f"{self.dtype} by {self._filled_to}"

    @property
    def memory(self) -> list[torch.Tensor]:
        """Packed weight and bias as writable bytes, uint8 ``[n]``.

        Only bytes of a weight of the same shape and dtype, packed for the same instruction set, may be written.
        """
        return [part.view(torch.uint8) for part in (self._packed, self._bias) if part is not None]

    @property
    def num_bytes(self) -> int:
        return sum(part.nbytes for part in (self._packed, self._scales, self._bias) if part is not None)


def multiply(library: NativeLibrary, weight: PackedWeight, x: torch.Tensor, *, apart: bool = False) -> torch.Tensor:
    """Return ``x`` float32 ``[..., k]`` times ``weight``, ``[..., n]``. A row's result does not depend on the other
    rows.

    With ``apart``, results of later elementwise torch operations do not depend on other rows either. torch's vectorized
    loops compute the last elements of a tensor differently. So rows that do not end at a vector boundary get a gap, and
    torch processes each row separately.
    """
    n, k = weight.n, weight.k
    stride = n + 1 if apart and n % VECTORS else n
    if x.dtype != torch.float32 or x.shape[-1] != k:
        raise TypeError(f"packed layers need float32 [..., {k}], not {x.dtype} {list(x.shape)}")
    out = x.new_empty(*x.shape[:-1], stride)[..., :n]
    flat = x.reshape(-1, k).contiguous()
    if len(flat):
        library.call("linear", weight.pointer, flat.data_ptr(), len(flat), k, out.data_ptr(), stride)
    return out


def interleaved(library: NativeLibrary, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Return the rows of ``gate`` and ``up`` ``[n, k]`` in alternating groups of one vector's lanes, as gated products
    need them.
    """
    rows = torch.stack([half.view(-1, library.lanes, half.shape[1]) for half in (gate, up)], dim=1)
    return rows.view(-1, gate.shape[1])


def fits_bfloat16(weight: torch.Tensor) -> bool:
    """Return whether bfloat16 represents every element exactly."""
    if isinstance(weight, NarrowWeight):
        weight = weight.kept
    if weight.dtype == torch.float16:  # has three more mantissa bits
        return not bool((weight.contiguous().view(torch.int16) & 0b111).any())
    if weight.dtype == torch.float32:
        return not bool((weight.detach().contiguous().view(torch.int32) & 0xFFFF).any())
    return weight.dtype == torch.bfloat16
