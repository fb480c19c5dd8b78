"""Weights in the layout the kernels read, in panels of as many rows as two vectors have lanes (``csrc/gemm.h``)."""

import ctypes
import mmap
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812

from penstock_enginecore.models.dtypes import NarrowWeight, widened
from penstock_enginecore.native.ffi_structs import Linear
from penstock_enginecore.native.library import NativeLibrary

# Weights rounded to 8-bit integers times a number per row: a decode step on a CPU takes as long as its weights take to read.
#
# A rounded weight stays a weight: whoever computes by it, transformers' own modules too, computes what the integers mean. The CPU
# kernels find that its rows are integers times a number, and keep those.

_LARGEST = 127
_CUT = 0xFF
"""Bits of a scale that are 0, so that it has 16 significant ones: its product with an integer is a float without rounding."""


@dataclass(frozen=True, slots=True)
class Int8Weight:
    """``numbers`` int8 ``[n, k]`` times ``scales`` float32 ``[n]`` are the weight, bit by bit."""

    numbers: torch.Tensor
    scales: torch.Tensor


def round_to_int8(weight: torch.Tensor) -> torch.Tensor:
    """A float32 weight ``[n, k]``, each row rounded to multiples of a 127th of its largest number: off by half of one at most."""
    scales = _up((weight.abs().amax(1, keepdim=True) / _LARGEST).clamp(min=torch.finfo(torch.float32).tiny))
    return (weight / scales).round() * scales


def as_int8(weight: torch.Tensor) -> Int8Weight | None:
    """The integers and scales of a float32 weight ``[n, k]`` that was rounded, None for any other."""
    if not weight.numel() or _exactly(weight[:1]) is None:
        return None
    return _exactly(weight)


def round_linears(module: torch.nn.Module, *, but: torch.nn.Module | None = None) -> float:
    """Round the weights of all linear layers, but those of ``but``, to new ones in float32. Returns the largest error of a layer,
    as a share of its weight's length as a vector.
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


_HUGE_PAGE = 2 * 1024 * 1024
_PIECE = 4 * 1024 * 1024
"""Numbers that are packed at a time."""
VECTORS = 64
"""Numbers: what torch's loops over vectors take at a time divides it."""
KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}
"""What the kernels call the dtypes that they keep weights in."""


class PackedWeight:
    """A weight ``[n, k]`` and a bias ``[n]``, packed. ``struct`` points into them. A weight whose every number bfloat16 holds
    is kept in it, and one whose rows are 8-bit integers times a number as such integers: a half and a quarter of the memory, and
    of the time to read it.
    """

    def __init__(
        self,
        library: NativeLibrary,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        *,
        half: bool | None = None,
    ) -> None:
        """``half``: whether it is kept in bfloat16, where it is known that this holds it, and else in float32; None: look."""
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
        self._packed = huge_empty((self.n + padding) * (self.k + -self.k % self._filled_to), self.dtype)
        self._bias = None if bias is None else widened(bias.detach()).float().clone()
        scales, bias_pointer = (None if part is None else part.data_ptr() for part in (self._scales, self._bias))
        self.struct = Linear(self._packed.data_ptr(), scales, bias_pointer, self.n, self.k, kind, library.parts)
        self.pointer = ctypes.addressof(self.struct)
        self._pack(library, weight)

    def overwrite(self, library: NativeLibrary, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        """Pack others in their place, of the same shapes. Raises ValueError where their numbers need another dtype."""
        self._check(weight, bias)
        self._pack(library, weight)
        if self._bias is not None and bias is not None:
            self._bias.copy_(bias)

    def like(self, library: NativeLibrary, weight: torch.Tensor, bias: torch.Tensor | None = None) -> "PackedWeight":
        """Others, packed as this one is. Raises as ``overwrite``."""
        self._check(weight, bias)
        return PackedWeight(library, weight, bias, half=self.dtype == torch.bfloat16)

    def _pack(self, library: NativeLibrary, weight: torch.Tensor) -> None:
        """Some panels at a time, so that no whole weight is there as floats."""
        panel, of = 2 * library.lanes, self.struct
        row_bytes = (self.k + -self.k % self._filled_to) * self.dtype.itemsize
        step = max(_PIECE // (panel * max(self.k, 1)), 1) * panel
        for first in range(0, self.n, step):
            rows = widened(weight.detach()[first : first + step]).float().contiguous()
            piece = Linear(of.packed + first * row_bytes, None, None, len(rows), self.k, of.kind, of.parts)
            library.call("pack", rows.data_ptr(), ctypes.addressof(piece))

    def _check(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        if self.dtype != torch.float32 and not (self.dtype == torch.bfloat16 and fits_bfloat16(weight)):
            raise ValueError(f"{str(self.dtype).removeprefix('torch.')} does not hold every number of the weight")
        if weight.shape != (self.n, self.k) or (bias is None) != (self._bias is None):
            raise ValueError(f"a weight {list(weight.shape)} does not go where [{self.n}, {self.k}] is")

    @property
    def layout(self) -> str:
        """Memory of weights of one shape and layout can be exchanged, between libraries with the same lanes."""
        return f"{self.dtype} by {self._filled_to}"

    @property
    def memory(self) -> list[torch.Tensor]:
        """What is packed, and the bias, as bytes uint8 ``[n]`` that may be written to: by those of a weight of the same shape and
        dtype that was packed for the same instructions.
        """
        return [part.view(torch.uint8) for part in (self._packed, self._bias) if part is not None]

    @property
    def num_bytes(self) -> int:
        return sum(part.nbytes for part in (self._packed, self._scales, self._bias) if part is not None)


def multiply(library: NativeLibrary, weight: PackedWeight, x: torch.Tensor, *, apart: bool = False) -> torch.Tensor:
    """``x`` float32 ``[..., k]`` by ``weight``, ``[..., n]``. A row's numbers do not depend on the rows beside it.

    ``apart``: nor do those that torch makes of it number by number. Its loops over vectors compute the last numbers of a tensor
    in another way; rows whose ends are not those of vectors have a gap behind them, so that each is a loop of its own.
    """
    n, k = weight.n, weight.k
    stride = n + 1 if apart and n % VECTORS else n
    if x.dtype != torch.float32 or x.shape[-1] != k:
        raise TypeError(f"a packed layer takes float32 [..., {k}], not {x.dtype} {list(x.shape)}")
    out = x.new_empty(*x.shape[:-1], stride)[..., :n]
    flat = x.reshape(-1, k).contiguous()
    if len(flat):
        library.call("linear", weight.pointer, flat.data_ptr(), len(flat), k, out.data_ptr(), stride)
    return out


def interleaved(library: NativeLibrary, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Rows of both ``[n, k]`` in turn, a vector's lanes at a time, as products with a gate take them."""
    rows = torch.stack([half.view(-1, library.lanes, half.shape[1]) for half in (gate, up)], dim=1)
    return rows.view(-1, gate.shape[1])


def fits_bfloat16(weight: torch.Tensor) -> bool:
    """Whether bfloat16 holds every number."""
    if isinstance(weight, NarrowWeight):
        weight = weight.kept
    if weight.dtype == torch.float16:  # has three bits more
        return not bool((weight.contiguous().view(torch.int16) & 0b111).any())
    if weight.dtype == torch.float32:
        return not bool((weight.detach().contiguous().view(torch.int32) & 0xFFFF).any())
    return weight.dtype == torch.bfloat16


def huge_empty(count: int, dtype: torch.dtype) -> torch.Tensor:
    """``[count]`` on huge pages where the system has them: weights are read from one end to the other."""
    size = count * dtype.itemsize
    if size < _HUGE_PAGE:
        return torch.empty(count, dtype=dtype)
    memory = mmap.mmap(-1, -(-size // _HUGE_PAGE) * _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE, 0, size // _HUGE_PAGE * _HUGE_PAGE)  # the last one would not be filled
    return torch.frombuffer(memory, dtype=dtype, count=count)
