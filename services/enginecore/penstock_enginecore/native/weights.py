"""Weights in the kernels' layout: panels with as many rows as two SIMD vectors have elements (``csrc/gemm.h``)."""

import ctypes
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812

from penstock_enginecore.huge_pages import huge_empty
from penstock_enginecore.models.dtypes import NarrowWeight, widened
from penstock_enginecore.native.ffi_structs import Linear
from penstock_enginecore.native.library import NativeLibrary

# Weights rounded to 8-bit integers with a factor per row. On a CPU, most of the time of a decode step is spent on
# reading the weights, so smaller weights make the step faster.
#
# A rounded weight is still a float tensor, so any code, including transformers' modules, computes with the rounded
# values. The CPU kernels detect that the rows of the weight are integers times a factor, and store the integers.

_LARGEST = 127
_CUT = 0xFF
"""Number of low bits of a scale that are set to zero. The scale then has 16 significant bits, so the product of the
scale and an 8-bit integer is exact in float32.
"""


@dataclass(frozen=True, slots=True)
class Int8Weight:
    """Integers and scales of a rounded weight. The weight is bit-identical to ``numbers`` int8 ``[n, k]`` times
    ``scales`` float32 ``[n]``.
    """

    numbers: torch.Tensor
    scales: torch.Tensor


def round_to_int8(weight: torch.Tensor) -> torch.Tensor:
    """Return a float32 weight ``[n, k]`` with each row rounded to multiples of 1/127 of its largest element. The error
    of an element is at most half of such a multiple.
    """
    scales = _up((weight.abs().amax(1, keepdim=True) / _LARGEST).clamp(min=torch.finfo(torch.float32).tiny))
    return (weight / scales).round() * scales


def as_int8(weight: torch.Tensor) -> Int8Weight | None:
    """Return the integers and scales of a float32 weight ``[n, k]`` that ``round_to_int8`` has rounded, or None for
    other weights.
    """
    if not weight.numel() or _exactly(weight[:1]) is None:
        return None
    return _exactly(weight)


def round_linears(module: torch.nn.Module, *, but: torch.nn.Module | None = None) -> float:
    """Replace the weights of all linear layers, except the layer ``but``, by rounded float32 weights.

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
    numbers = (weight / scales).nan_to_num(0.0).round()  # a row of zeros needs no scale
    if not torch.equal(numbers * scales, weight):
        return None
    return Int8Weight(numbers.to(torch.int8), scales[:, 0].contiguous())


_PIECE = 4 * 1024 * 1024
"""Number of elements that are packed at a time."""
VECTORS = 64
"""Number of elements that is a multiple of the number of elements that torch's vectorized loops process at a time."""
KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}
"""Numbers that stand for dtypes of weights in the kernels' interface."""
_HALVED = 4
"""Number that stands for float32 weights that are stored as two bfloat16 parts, in the kernels' interface."""
_HALVED_PARTS = 2
"""Number of bfloat16 parts into which inputs are split if weights are stored as two parts."""
PACKED_ROWS = 3
"""Number that stands for an embedding table that is a packed weight, in the kernels' interface."""


class PackedWeight:
    """Weight ``[n, k]`` and bias ``[n]`` in the kernels' layout. ``struct`` points into the memory of both.

    A weight whose elements bfloat16 represents exactly is stored as bfloat16. A weight whose rows are 8-bit integers
    times a factor is stored as integers. Compared with float32, this needs half or a quarter of the memory, and of the
    time to read the weight.
    """

    def __init__(
        self,
        library: NativeLibrary,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        *,
        half: bool | None = None,
        halved: bool = False,
    ) -> None:
        """Pack a weight. ``half`` is true to store the weight as bfloat16, and false to store it as float32. If
        ``half`` is None, the dtype is detected.

        If ``halved`` is true and the library has a matrix unit that multiplies only bfloat16, the unit also multiplies
        float32 weights: weights and inputs are split into two bfloat16 parts, with 16 or more significant bits
        together. The result differs from the float32 product by about ``2 ** -17`` of each input's share.
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
        kind, parts = KINDS[self.dtype], library.parts
        if halved and parts > _HALVED_PARTS and self.dtype != torch.int8:
            kind, parts = (_HALVED if self.dtype == torch.float32 else kind), _HALVED_PARTS
        self._filled_to = library.filled_to(kind)
        self._packed = huge_empty((self.n + padding) * (self.k + -self.k % self._filled_to), dtype=self.dtype)
        self._bias = None if bias is None else widened(bias.detach()).float().clone()
        scales, bias_pointer = (None if part is None else part.data_ptr() for part in (self._scales, self._bias))
        self.struct = Linear(self._packed.data_ptr(), scales, bias_pointer, self.n, self.k, kind, parts)
        self.pointer = ctypes.addressof(self.struct)
        self._pack(library, weight)

    def overwrite(self, library: NativeLibrary, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        """Replace the weight and bias by a weight and bias of the same shapes. Raises ValueError if the packed dtype
        cannot store the new values exactly.
        """
        self._check(weight, bias)
        self._pack(library, weight)
        if self._bias is not None and bias is not None:
            self._bias.copy_(bias)

    def like(self, library: NativeLibrary, weight: torch.Tensor, bias: torch.Tensor | None = None) -> "PackedWeight":
        """Return ``weight`` and ``bias`` packed in the same format as this object. Raises the errors of ``overwrite``."""
        self._check(weight, bias)
        return PackedWeight(library, weight, bias, half=self.dtype == torch.bfloat16)

    def _pack(self, library: NativeLibrary, weight: torch.Tensor) -> None:
        """Pack a few panels at a time, so that memory never contains a full float32 copy of the weight."""
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

    def rows(self, library: NativeLibrary, indices: torch.Tensor) -> torch.Tensor:
        """Return the rows float32 ``[..., k]`` of the weight with the int64 ``indices`` ``[...]``. The rows are equal to
        those of the weight that was packed. Raises IndexError if an index is out of range.
        """
        flat = indices.reshape(-1).contiguous()
        if len(wrong := flat[(flat < 0) | (flat >= self.n)]):
            raise IndexError(f"row {wrong[0]} is out of range: the weight has the rows 0 to {self.n - 1}")
        out = torch.empty(len(flat), self.k)
        if len(flat):
            library.call("unpack", self.pointer, flat.data_ptr(), len(flat), out.data_ptr())
        return out.view(*indices.shape, self.k)

    @property
    def layout(self) -> str:
        """Name of the format of the packed weight. If two weights have equal shapes and layouts, the memory of one may
        be copied to the other. The libraries of the two weights must have the same SIMD vector length.
        """
        return f"{self.dtype} by {self._filled_to}"

    @property
    def memory(self) -> list[torch.Tensor]:
        """Packed weight and bias as a writable tensor uint8 ``[n]``.

        Only the memory of a weight of the same shape and dtype, packed for the same instruction set, may be written to
        it.
        """
        return [part.view(torch.uint8) for part in (self._packed, self._bias) if part is not None]

    @property
    def num_bytes(self) -> int:
        return sum(part.nbytes for part in (self._packed, self._scales, self._bias) if part is not None)


def multiply(library: NativeLibrary, weight: PackedWeight, x: torch.Tensor, *, apart: bool = False) -> torch.Tensor:
    """Return the product ``[..., n]`` of ``x``, float32 ``[..., k]``, and ``weight``. The result of a row does not
    depend on the other rows.

    If ``apart`` is true, the results of later elementwise torch operations do not depend on other rows either. torch's
    vectorized loops compute elements after the last complete SIMD vector of a tensor differently. So if a row is not a
    multiple of the vector length, a gap follows each row, and torch processes each row separately.
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
    """Return the rows of ``gate`` and ``up`` ``[n, k]`` in alternating groups of the SIMD vector length, in the order
    that the kernels' gated products need.
    """
    rows = torch.stack([half.view(-1, library.lanes, half.shape[1]) for half in (gate, up)], dim=1)
    return rows.view(-1, gate.shape[1])


def fits_bfloat16(weight: torch.Tensor) -> bool:
    """Return whether bfloat16 represents every element exactly."""
    if isinstance(weight, NarrowWeight):
        weight = weight.kept
    if weight.dtype == torch.float16:  # float16 has three more mantissa bits than bfloat16
        return not bool((weight.contiguous().view(torch.int16) & 0b111).any())
    if weight.dtype == torch.float32:
        return not bool((weight.detach().contiguous().view(torch.int32) & 0xFFFF).any())
    return weight.dtype == torch.bfloat16
