"""Grouped matrix products with dense weights: each expert's rows times the expert's weight.

Rows are sorted by expert, and only a tensor on the device contains where each expert's rows end. A product can gather
its rows from the tokens, apply the gated activation to its sums, or scatter its results back to the pairs of tokens and
experts. So a mixture of experts needs no other kernel to move or activate rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from penstock_enginecore.forward.cuda.kernel_api import Activation, ClampedGate, SharedProduct
from penstock_enginecore.forward.cuda.kernels.activation import activated
from penstock_enginecore.forward.cuda.kernels.configurations import (
    DenseExpertTiles,
    ExpertTiles,
    InvariantTiles,
    dense_expert_tiles,
    device_name,
)
from penstock_enginecore.forward.cuda.kernels.invariant import tile_sums
from penstock_enginecore.forward.cuda.kernels.work import find


@dataclass(frozen=True, slots=True)
class Groups:
    """Arguments of every grouped product, for dense and quantized weights; see ``grouped_product``."""

    x: torch.Tensor
    bias: torch.Tensor | None
    ends: torch.Tensor
    out: torch.Tensor
    order: torch.Tensor | None
    top_k: int
    activation: Activation | ClampedGate | None

    def check(self, weight: Sequence[torch.Tensor], experts: int, out_features: int, in_features: int) -> None:
        """Check the arguments against a weight of the given sizes, whose tensors are ``weight``. Raises ValueError if a
        shape is wrong or a tensor is not contiguous.
        """
        width = out_features if self.activation is None else out_features // 2
        if self.x.shape[1] != in_features or self.out.shape[1] != width:
            raise ValueError(
                f"shapes do not match: input {list(self.x.shape)}, weights of {experts} experts with {out_features} "
                f"rows of {in_features} columns, output {list(self.out.shape)}"
            )
        if self.ends.shape != (experts,):
            raise ValueError(f"`ends` has shape {list(self.ends.shape)}, but there are {experts} experts")
        rows = len(self.x) if self.order is None else len(self.x) * max(1, self.top_k)
        if self.order is not None and self.order.shape != (rows,):
            raise ValueError(f"`order` has shape {list(self.order.shape)}, but there are {rows} rows")
        if len(self.out) != rows:
            raise ValueError(f"the output has {len(self.out)} rows, but the product has {rows} rows")
        if self.bias is not None and self.bias.shape != (experts, out_features):
            raise ValueError(
                f"`bias` has shape {list(self.bias.shape)}, but {experts} experts have {out_features} rows each"
            )
        given = [each for each in (self.bias, self.order) if each is not None]
        if not all(each.is_contiguous() for each in (self.x, self.ends, self.out, *weight, *given)):
            raise ValueError("all tensors of a matrix product must be contiguous")

    def constants(self) -> dict[str, Any]:
        """Return the compile-time constants of these arguments."""
        experts = max(16, triton.next_power_of_2(len(self.ends)))
        gate = "clamped" if isinstance(self.activation, ClampedGate) else self.activation or ""
        return {"EXPERTS": experts, "TOP_K": self.top_k, "GATE": gate}

    @property
    def gate(self) -> tuple[float, float]:
        """Alpha and limit of the activation. They are 0 except for ``ClampedGate``."""
        gate = self.activation
        return (gate.alpha, gate.limit) if isinstance(gate, ClampedGate) else (0.0, 0.0)

    def grid(self, tiles: ExpertTiles | DenseExpertTiles | InvariantTiles, out_features: int) -> tuple[int, int]:
        """Return the grid of a product: tiles of rows, and tiles of output features. A tile of rows has at least one
        row, and each expert has at most one partial tile.
        """
        rows = len(self.out)
        return min(rows, rows // tiles.block_m + len(self.ends)), triton.cdiv(out_features, tiles.block_n)


def grouped_product(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    ends: torch.Tensor,
    out: torch.Tensor,
    *,
    order: torch.Tensor | None = None,
    top_k: int = 0,
    activation: Activation | ClampedGate | None = None,
    transposed: bool = False,
    shared: SharedProduct | None = None,
    invariant: bool = False,
) -> None:
    """Multiply each expert's rows by the expert's weight, add the expert's bias, apply the activation if given, and
    write the result to ``out``. Sums are float32. Rows of ``out`` that belong to no expert are unchanged.

    With ``order`` and ``top_k``, row i of the product is row ``order[i] // top_k`` of ``x``. With ``order`` alone, row
    i of the product is row i of ``x``, and its result is written to row ``order[i]`` of ``out``.

    Args:
        x: ``[rows, in_features]``, sorted by expert, or ``[tokens, in_features]`` with ``top_k``. All tensors are
            contiguous.
        weight: ``[experts, out_features, in_features]``, or ``[experts, in_features, out_features]`` if ``transposed``.
        bias: ``[experts, out_features]``, or None.
        ends: int32 ``[experts]``, the end of each expert's rows.
        out: ``[rows, out_features]``, or ``[rows, out_features / 2]`` with an activation.
        order: int32 ``[rows]``, or None.
        top_k: Number of rows that read the same row of ``x``, or 0.
        activation: Gated activation. The features of gate and up are the two halves of ``out_features``, or alternate
            for ``ClampedGate``.
        transposed: Whether the last two dimensions of ``weight`` are swapped.
        shared: Product of a shared MLP to compute in the same launch, or None.
        invariant: Whether sums must have the same order for any number of rows.

    Raises:
        ValueError: Shapes or strides are not supported.
    """
    groups = Groups(x, bias, ends, out, order, top_k, activation)
    experts, out_features, in_features = weight.transpose(1, 2).shape if transposed else weight.shape
    groups.check([weight], experts, out_features, in_features)
    if shared is not None:
        shared.check(activated=activation is not None)
    rows = len(out)
    if not rows:
        return
    of_device = device_name(x.device)
    tiles = dense_expert_tiles(rows // experts, out_features, x.element_size(), of_device, invariant=invariant)
    of_rows, of_features = groups.grid(tiles, out_features)
    more, arguments, even = _beside(shared, tiles, of_features)
    grouped_tiles[of_rows + more, of_features](
        x, weight, bias, ends, order, out, experts, out_features, in_features, *groups.gate, of_rows, *arguments,
        EVEN=in_features % tiles.block_k == 0, SHARED_EVEN=even, BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n,
        BLOCK_K=tiles.block_k, PRECISION="ieee" if x.dtype == torch.float32 else "tf32", TRANSPOSED=transposed,
        **groups.constants(), num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip


def _beside(
    shared: SharedProduct | None, tiles: DenseExpertTiles | InvariantTiles, of_features: int
) -> tuple[int, tuple[Any, ...], bool]:
    """Return how many more programs in the first dimension of the grid compute ``shared``, the kernel's arguments, and
    whether the last tile of columns is full. The second dimension of the grid has ``of_features`` programs.
    """
    if shared is None:
        return 0, (None, None, None, 0, 0, 0), True
    tokens, (out_features, in_features) = len(shared.x), shared.weight.shape
    programs = triton.cdiv(tokens, tiles.block_m) * triton.cdiv(out_features, tiles.block_n)
    arguments = shared.x, shared.weight, shared.out, tokens, out_features, in_features
    return triton.cdiv(programs, of_features), arguments, in_features % tiles.block_k == 0


@triton.jit
def find_rows(ends, experts, tile, BLOCK_M: tl.constexpr, EXPERTS: tl.constexpr):
    """Find the expert and the rows of the tile with index ``tile``. A tile has at most ``BLOCK_M`` rows of one expert.

    ``ends`` is int32 ``[experts]``, the end of each expert's rows. Returns whether the tile exists, the tile's expert,
    the index of the tile's first row, and the end of the expert's rows.
    """
    indices = tl.arange(0, EXPERTS)
    known = indices < experts
    upto_rows = tl.load(ends + indices, mask=known, other=0)
    from_rows = tl.load(ends + indices - 1, mask=known & (indices > 0), other=0)
    counts = tl.where(known, tl.cdiv(upto_rows - from_rows, BLOCK_M), 0)
    expert, nth = find(counts, tl.cumsum(counts, 0), indices, tile)
    begin = tl.sum(tl.where(indices == expert, from_rows, 0), 0)
    end = tl.sum(tl.where(indices == expert, upto_rows, 0), 0)
    return tile < tl.sum(counts, 0), expert, begin + nth * BLOCK_M, end


@triton.jit
def expert_places(
    x, order, begin, end, nth, out_features, in_features,
    TOP_K: tl.constexpr, GATE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Return the indices of a tile's rows, the output features of the weight to read, and the addresses of the rows of
    ``x``. The tile's first row is ``begin``.

    With a gated activation, features of gate and up alternate. Indices beyond the last row or feature read the last row
    or feature instead. The results for such indices are not stored.
    """
    m = begin + tl.arange(0, BLOCK_M)
    source = tl.minimum(m, end - 1)
    if TOP_K > 0:
        source = tl.load(order + source) // TOP_K
    n = tl.minimum(nth * BLOCK_N + tl.arange(0, BLOCK_N), out_features - 1)
    if GATE != "" and GATE != "clamped":
        n = n // 2 + (n % 2) * (out_features // 2)
    return m, n, x + source.to(tl.int64) * in_features


@triton.jit
def store_rows(
    total, bias, n_read, alpha, limit, out, order, m, end, nth, out_features,
    TOP_K: tl.constexpr, GATE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Add ``bias`` to the sums if given, apply the activation if there is one, and write the rows before ``end`` to
    ``out``, in the given ``order`` if rows are not gathered.
    """
    if bias is not None:
        total += tl.load(bias + n_read).to(tl.float32)[None, :]
    if GATE == "":
        value, n, width = total, nth * BLOCK_N + tl.arange(0, BLOCK_N), out_features
    else:
        gate, up = tl.split(tl.reshape(total, (BLOCK_M, BLOCK_N // 2, 2)))
        value = activated(gate, up, alpha, limit, GATE)
        n, width = nth * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2), out_features // 2
    inside = (m[:, None] < end) & (n[None, :] < width)
    target = m
    if order is not None and TOP_K == 0:
        target = tl.load(order + m, mask=m < end, other=0)
    place = target[:, None].to(tl.int64) * width + n[None, :]
    tl.store(out + place, value.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["tiles", "tokens"])
def grouped_tiles(
    x, weight, bias, ends, order, out, experts, out_features, in_features, alpha, limit, tiles,
    shared_x, shared_weight, shared_out, tokens, shared_out_features, shared_in_features,
    EVEN: tl.constexpr, SHARED_EVEN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, PRECISION: tl.constexpr, EXPERTS: tl.constexpr, TRANSPOSED: tl.constexpr,
    TOP_K: tl.constexpr, GATE: tl.constexpr,
):  # fmt: skip
    """Compute a tile of ``out`` with rows of one expert, if the program's tile exists. Programs from ``tiles`` on
    compute a tile of the shared product.
    """
    tile, nth = tl.program_id(0), tl.program_id(1)
    # With one branch and its else, the compiler would give each branch shared memory of its own.
    if shared_weight is not None:  # noqa: SIM102 - this condition is a compile-time constant, the next one is not
        if tile >= tiles:
            _shared_tile(
                shared_x, shared_weight, shared_out, tokens, shared_out_features, shared_in_features, alpha, limit,
                (tile - tiles) * tl.num_programs(1) + nth, SHARED_EVEN, BLOCK_M, BLOCK_N, BLOCK_K, PRECISION, GATE,
            )  # fmt: skip
    if tile < tiles:
        _expert_tile(
            x, weight, bias, ends, order, out, experts, out_features, in_features, alpha, limit, tile, nth,
            EVEN, BLOCK_M, BLOCK_N, BLOCK_K, PRECISION, EXPERTS, TRANSPOSED, TOP_K, GATE,
        )  # fmt: skip


@triton.jit
def _expert_tile(
    x, weight, bias, ends, order, out, experts, out_features, in_features, alpha, limit, tile, nth,
    EVEN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
    EXPERTS: tl.constexpr, TRANSPOSED: tl.constexpr, TOP_K: tl.constexpr, GATE: tl.constexpr,
):  # fmt: skip
    there, expert, begin, end = find_rows(ends, experts, tile, BLOCK_M, EXPERTS)
    if there:
        m, n_read, x_rows = expert_places(
            x, order, begin, end, nth, out_features, in_features, TOP_K, GATE, BLOCK_M, BLOCK_N
        )
        own = weight + expert.to(tl.int64) * in_features * out_features
        if TRANSPOSED:
            columns = own + n_read[None, :]
            total = tile_sums(x_rows, columns, in_features, out_features, EVEN, BLOCK_M, BLOCK_N, BLOCK_K, PRECISION)
        else:
            columns = own + n_read[None, :].to(tl.int64) * in_features
            total = tile_sums(x_rows, columns, in_features, 1, EVEN, BLOCK_M, BLOCK_N, BLOCK_K, PRECISION)
        if bias is not None:
            bias += expert * out_features
        store_rows(
            total, bias, n_read, alpha, limit, out, order, m, end, nth, out_features, TOP_K, GATE, BLOCK_M, BLOCK_N
        )


@triton.jit
def _shared_tile(
    x, weight, out, tokens, out_features, in_features, alpha, limit, tile,
    EVEN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
    GATE: tl.constexpr,
):  # fmt: skip
    of_rows = tl.cdiv(tokens, BLOCK_M)
    nth = tile // of_rows
    if nth * BLOCK_N < out_features:
        begin = tile % of_rows * BLOCK_M
        m, n_read, x_rows = expert_places(
            x, None, begin, tokens, nth, out_features, in_features, 0, GATE, BLOCK_M, BLOCK_N
        )
        columns = weight + n_read[None, :].to(tl.int64) * in_features
        total = tile_sums(x_rows, columns, in_features, 1, EVEN, BLOCK_M, BLOCK_N, BLOCK_K, PRECISION)
        store_rows(
            total, None, n_read, alpha, limit, out, None, m, tokens, nth, out_features, 0, GATE, BLOCK_M, BLOCK_N
        )
