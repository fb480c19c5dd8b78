"""Attention kernels with the tuned configurations that engines use."""

from collections.abc import Iterator

from penstock_enginecore.forward.cuda.kernels.attention import (
    LONGEST_SPLIT,
    merge_pieces,
    pieces_per_request,
    prefill_tiles,
    split_keys,
)
from penstock_enginecore.forward.cuda.kernels.configurations import Decode, Prefill, load_tuned
from tests.compiled.kernel import Kernel

HEADS, KV_HEADS, BLOCK_SIZE, REQUESTS = 32, 8, 16, 256
NUMBERS = {1: "*fp8e4nv", 2: "*bf16", 4: "*fp32"}
SIZES = {64: (64,), 128: (80, 96, 128), 256: (256,), 512: (512,)}
"""Head sizes by the padded size whose configuration they use."""
ALIGNED = frozenset(
    [
        "query",
        "keys",
        "values",
        "block_table",
        "query_start_loc",
        "seq_lens",
        "sums_out",
        "largest_out",
        "total_out",
        "sums_in",
        "largest_in",
        "total_in",
        "out",
        "key_stride",
        "value_stride",
    ]
)
"""Aligned arguments: the launcher checks them, or torch allocates them.

The stride of block tables may have any value.
"""


def kernels(bytes_per_number: tuple[int, ...] = (1, 2)) -> Iterator[Kernel]:
    """Yield kernels for split keys, prefill and merge, for a bf16 layer with 32 heads and 8 KV heads.

    The caches are bf16 and fp8.
    """
    tuned = load_tuned()
    for decode in tuned.decode:
        if decode.bytes in bytes_per_number:
            yield from (
                _split(decode, size, longest=longest)
                for size in SIZES[decode.head_size]
                for longest in (1, LONGEST_SPLIT)
            )
    for prefill in tuned.prefill:
        if prefill.bytes in bytes_per_number:
            yield from (
                _prefill(prefill, size, spans=spans) for size in SIZES[prefill.head_size] for spans in (False, True)
            )
    for size in (64, 128, 256, 512):
        yield from (_merge(size, longest=longest) for longest in (1, LONGEST_SPLIT))


def gate() -> Iterator[Kernel]:
    """Yield the kernels that most models use. They are few enough to compile in each test run."""
    return (kernel for kernel in kernels() if kernel.constants["SIZE_V"] == 128)


def _arguments(bytes_per_number: int) -> dict[str, str | None]:
    query = "*fp32" if bytes_per_number == 4 else "*bf16"
    cache = NUMBERS[bytes_per_number]
    tables = {"block_table": "*i32", "query_start_loc": "*i32", "seq_lens": "*i32"}
    numbers = {
        "num_requests": "i32",
        "capacity": "i32",
        "table_stride": "i32",
        "key_stride": "i32",
        "value_stride": "i32",
        "scaling": "fp32",
        "value_scale": "fp32",
    }
    sums = dict.fromkeys(("sums_out", "largest_out", "total_out", "sums_in", "largest_in", "total_in"), "*fp32")
    return {
        "query": query, "keys": cache, "values": cache, "out": query, "sinks": None, "key_ends": None,
        **tables, **numbers, **sums,
    }  # fmt: skip


def _constants(size: int) -> dict[str, object]:
    padded = 1 << (size - 1).bit_length()
    return {
        "HEADS": HEADS, "KV_HEADS": KV_HEADS, "SIZE": size, "SIZE_V": size, "PADDED": padded, "PADDED_V": padded,
        "BLOCK_SIZE": BLOCK_SIZE, "WINDOW": 0, "ATTENTION_CHUNK": 0, "SOFTCAP": 0.0, "PRECISION": "tf32",
        "REQUESTS": REQUESTS,
    }  # fmt: skip


def _pieces(tiles: Decode, longest: int) -> dict[str, object]:
    return {"PIECE": tiles.piece, "MAX_PIECES": pieces_per_request(KV_HEADS), "LONGEST": longest}


def _split(tiles: Decode, size: int, *, longest: int) -> Kernel:
    """Return the kernel for steps of decodes, or for steps in which requests may have several new tokens."""
    rows, block_n = (16, tiles.block_n) if longest == 1 else (32, max(16, tiles.block_n // 2))
    own = {"ROWS": rows, "BLOCK_N": block_n, **_pieces(tiles, longest)}
    return Kernel(
        f"{'decode' if longest == 1 else 'split keys'}, {size}, {_cache(tiles.bytes)}",
        split_keys, _arguments(tiles.bytes), {**_constants(size), **own},
        ALIGNED, tiles.warps, tiles.stages, ("cp.async.cg",), early=6,
    )  # fmt: skip


def _prefill(tiles: Prefill, size: int, *, spans: bool) -> Kernel:
    """Return the kernel for prefill. ``spans``: whether queries can attend to later keys."""
    decode = next(one for one in load_tuned().decode if (one.head_size, one.bytes) == (tiles.head_size, tiles.bytes))
    own = {"BLOCK_M": tiles.block_m, "BLOCK_N": tiles.block_n, **_pieces(decode, LONGEST_SPLIT)}
    arguments = {**_arguments(tiles.bytes), "key_ends": "*i32" if spans else None}
    needed = ("wgmma.mma_async",) if tiles.block_m >= 64 else ()
    return Kernel(
        f"prefill{' with spans' * spans}, {size}, {_cache(tiles.bytes)}", prefill_tiles, arguments, {**_constants(size), **own},
        ALIGNED, tiles.warps, tiles.stages, needed, early=3,
    )  # fmt: skip


def _merge(size: int, *, longest: int) -> Kernel:
    decode = next(one for one in load_tuned().decode if one.head_size >= size and one.bytes == 2)
    names = ("HEADS", "SIZE_V", "PADDED_V", "WINDOW", "ATTENTION_CHUNK", "REQUESTS")
    own = {**_pieces(decode, longest), "FEWEST": 2, "AT_ONCE": 16}
    constants = {**{name: _constants(size)[name] for name in names}, **own}
    name = f"merge, {size}" if longest == 1 else f"merge of queries, {size}"
    return Kernel(name, merge_pieces, _arguments(2), constants, ALIGNED, early=3 if longest == 1 else 6)


def _cache(bytes_per_number: int) -> str:
    return {1: "fp8", 2: "bf16", 4: "fp32"}[bytes_per_number]
