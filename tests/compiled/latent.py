"""Attention over a latent cache, in the shapes of DeepSeek-V3 (128 heads) and DeepSeek-V2-Lite (16 heads)."""

from collections.abc import Iterator

from penstock_enginecore.forward.cuda.kernels.attention import LONGEST_SPLIT
from penstock_enginecore.forward.cuda.kernels.configurations import Latent, latent_tiles
from penstock_enginecore.forward.cuda.kernels.latent_attention import latent_attention, latent_pieces
from tests.compiled.attention import BLOCK_SIZE, REQUESTS
from tests.compiled.kernel import Kernel

LATENT, ROTARY = 512, 64
HEADS = (16, 128)
_ARGUMENTS: dict[str, str | None] = {
    "query": "*bf16", "cache": "*bf16", "block_table": "*i32", "query_start_loc": "*i32", "seq_lens": "*i32",
    "out": "*bf16", "sums_out": "*fp32", "largest_out": "*fp32", "total_out": "*fp32", "num_requests": "i32",
    "capacity": "i32", "table_stride": "i32", "stride": "i32", "scaling": "fp32",
}  # fmt: skip
_ALIGNED = frozenset(_ARGUMENTS) - {"num_requests", "capacity", "table_stride", "scaling"}


def kernels() -> Iterator[Kernel]:
    """Yield kernels for decodes and prompts. Batch-invariant kernels use the same tiles as prompts."""
    for heads in HEADS:
        large = latent_tiles(1 << 30, 2)
        yield _kernel(f"latent decode, {heads} heads", latent_tiles(heads, 2), heads, longest=1)
        yield _kernel(f"latent split keys, {heads} heads", large, heads, longest=LONGEST_SPLIT)
        yield _kernel(f"latent prefill, {heads} heads", large, heads, longest=LONGEST_SPLIT, splits=False)


def gate() -> Iterator[Kernel]:
    """Yield the kernels for decodes."""
    return (kernel for kernel in kernels() if kernel.constants["LONGEST"] == 1)


def _kernel(name: str, tiles: Latent, heads: int, *, longest: int, splits: bool = True) -> Kernel:
    constants = {
        "HEADS": heads, "LATENT": LATENT, "ROTARY": ROTARY, "PADDED": LATENT, "PADDED_ROTARY": ROTARY,
        "BLOCK_SIZE": BLOCK_SIZE, "PRECISION": "tf32", "REQUESTS": REQUESTS, "ROWS": tiles.rows,
        "HEAD_ROWS": min(heads, tiles.rows), "BLOCK_N": tiles.block_n, "SPLITS": splits, "PIECE": tiles.piece,
        "MAX_PIECES": latent_pieces(heads), "LONGEST": longest,
    }  # fmt: skip
    must_have = ("cp.async", "wgmma.mma_async") if tiles.rows >= 64 else ("cp.async",)
    return Kernel(
        name, latent_attention, _ARGUMENTS, constants, _ALIGNED, tiles.warps, tiles.stages, must_have, early=6
    )
