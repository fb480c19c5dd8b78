"""Paged attention in Triton. Requests of one new token and those of several take different kernels, launched one after the other:
what their grids depend on are padded sizes alone, each program finds on the device what it is to do, and they can be captured.

The keys of a decode are cut at positions that follow from its own length, as in FlashDecoding (Dao et al., 2023), and merged in
order: it has the same bits alone and among others. Numbers of an fp8 cache are converted, without loss, to the queries' type
before they are multiplied, so that products are summed in float32 throughout, and need no second level of sums.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton

from penstock_enginecore.attention.base import AttentionParams
from penstock_enginecore.attention.kv_cache import UNSCALED, KVScales
from penstock_enginecore.forward.cuda.kernel_api import GroupInputs
from penstock_enginecore.forward.cuda.kernels.attention_decode import decode_pieces, merge_pieces
from penstock_enginecore.forward.cuda.kernels.attention_prefill import prefill_tiles
from penstock_enginecore.forward.cuda.kernels.configurations import MIN_BLOCK_SIZE, AttentionTiles, attention_tiles

_ITEMS_PER_REQUEST = 256
"""About how many pieces, of all KV heads, one long decode is cut into: some more than a device has multiprocessors."""
_PROGRAMS_PER_PROCESSOR = 2
_INTERPRETED_PROGRAMS = 4
_MERGED_AT_ONCE = 16


def pieces_per_request(kv_heads: int) -> int:
    """The most pieces that the keys of a decode are cut into."""
    return max(16, int(triton.next_power_of_2(_ITEMS_PER_REQUEST // kv_heads)))


@dataclass(frozen=True, slots=True)
class Scratch:
    """What the pieces of decodes leave for their merge, float32: weighted ``sums`` ``[requests, pieces, heads, head size]``, the
    ``largest`` score and the ``total`` of the weights ``[requests, pieces, heads]``.
    """

    sums: torch.Tensor
    largest: torch.Tensor
    total: torch.Tensor

    @classmethod
    def allocate(cls, requests: int, heads: int, kv_heads: int, head_size_v: int, device: torch.device) -> "Scratch":
        """For steps of up to so many requests, in layers of this or a smaller shape."""
        shape = (requests, pieces_per_request(kv_heads), heads)
        sums = torch.empty(*shape, head_size_v, dtype=torch.float32, device=device)
        return cls(sums, *torch.empty(2, *shape, dtype=torch.float32, device=device))


def attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    out: torch.Tensor,
    group: GroupInputs,
    params: AttentionParams,
    scratch: Scratch,
    scales: KVScales = UNSCALED,
    *,
    decodes_only: bool = False,
    invariant: bool = False,
) -> None:
    """Causal attention of ``query`` ``[tokens, heads, head size]`` over ``keys`` and ``values`` ``[blocks, kv_heads, block_size,
    head size]`` into ``out`` ``[tokens, heads, head_size_v]``; rows of padding stay as they are. ``decodes_only``: no request has
    more than one new token, which saves a launch. ``invariant``: decodes, too, are tiles of queries, so that a row has the bits
    that it would have in a prompt. ``scales``: of an fp8 cache. ValueError for tensors that are not laid out, or aligned, as
    kernels read them.
    """
    _check(query, keys, values, out, group, scratch)
    tiles = attention_tiles(
        max(triton.next_power_of_2(query.shape[2]), triton.next_power_of_2(out.shape[2])), keys.element_size()
    )
    if invariant:
        _prefill(query, keys, values, out, group, params, scales, tiles, fewest=1)
        return
    _decode(query, keys, values, out, group, params, scratch, scales, tiles)
    if not decodes_only:
        _prefill(query, keys, values, out, group, params, scales, tiles, fewest=2)


def _decode(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    out: torch.Tensor,
    group: GroupInputs,
    params: AttentionParams,
    scratch: Scratch,
    scales: KVScales,
    tiles: AttentionTiles,
) -> None:
    heads, kv_heads, requests = query.shape[1], keys.shape[1], len(group.seq_lens)
    constants = _constants(query, keys, out, params)
    pieces = pieces_per_request(kv_heads)
    longest = group.block_table.shape[1] * keys.shape[2]
    items = requests * min(pieces, triton.cdiv(longest, tiles.decode.piece)) * kv_heads
    decode_pieces[(min(items, programs(query.device)),)](
        query, keys, values, group.block_table, group.query_start_loc, group.seq_lens,
        scratch.sums, scratch.largest, scratch.total,
        requests, group.block_table.stride(0), keys.stride(0), values.stride(0), params.scaling * scales.key,
        **constants, REQUESTS=max(16, triton.next_power_of_2(requests)),
        ROWS=max(16, triton.next_power_of_2(heads // kv_heads)), BLOCK_N=tiles.decode.block_n,
        PIECE=tiles.decode.piece, MAX_PIECES=pieces, num_warps=tiles.decode.warps, num_stages=tiles.decode.stages,
    )  # fmt: skip
    shared = ("HEADS", "SIZE_V", "PADDED_V", "WINDOW", "ATTENTION_CHUNK")
    merge_pieces[(requests, heads)](
        scratch.sums, scratch.largest, scratch.total, group.query_start_loc, group.seq_lens, params.sinks, out, scales.value,
        **{name: constants[name] for name in shared}, PIECE=tiles.decode.piece, MAX_PIECES=pieces,
        AT_ONCE=_MERGED_AT_ONCE, num_warps=4,
    )  # fmt: skip


def _prefill(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    out: torch.Tensor,
    group: GroupInputs,
    params: AttentionParams,
    scales: KVScales,
    tiles: AttentionTiles,
    *,
    fewest: int,
) -> None:
    """Requests of ``fewest`` new tokens or more."""
    kv_heads, requests = keys.shape[1], len(group.seq_lens)
    group_size = query.shape[1] // kv_heads
    block_m = max(tiles.prefill.block_m, triton.next_power_of_2(group_size))
    items = (len(query) // (block_m // group_size) + requests) * kv_heads
    prefill_tiles[(min(items, programs(query.device)),)](
        query, keys, values, group.block_table, group.query_start_loc, group.seq_lens, params.sinks, group.key_ends, out,
        requests, group.block_table.stride(0), keys.stride(0), values.stride(0), params.scaling * scales.key, scales.value,
        **_constants(query, keys, out, params), REQUESTS=max(16, triton.next_power_of_2(requests)),
        BLOCK_M=block_m, BLOCK_N=tiles.prefill.block_n, FEWEST=fewest,
        num_warps=tiles.prefill.warps, num_stages=tiles.prefill.stages,
    )  # fmt: skip


def _constants(query: torch.Tensor, keys: torch.Tensor, out: torch.Tensor, params: AttentionParams) -> dict[str, Any]:
    """What a kernel is compiled for."""
    size, size_v = query.shape[2], out.shape[2]
    return {
        "HEADS": query.shape[1],
        "KV_HEADS": keys.shape[1],
        "SIZE": size,
        "SIZE_V": size_v,
        "PADDED": max(16, triton.next_power_of_2(size)),
        "PADDED_V": max(16, triton.next_power_of_2(size_v)),
        "BLOCK_SIZE": keys.shape[2],
        "WINDOW": params.sliding_window or 0,
        "ATTENTION_CHUNK": params.attention_chunk or 0,
        "SOFTCAP": params.softcap or 0.0,
        "PRECISION": "ieee" if query.dtype == torch.float32 else "tf32",
    }


def programs(device: torch.device) -> int:
    """How many programs share the work, where there is enough."""
    if device.type == "cpu":
        return _INTERPRETED_PROGRAMS
    return int(torch.cuda.get_device_properties(device).multi_processor_count) * _PROGRAMS_PER_PROCESSOR


def _check(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    out: torch.Tensor,
    group: GroupInputs,
    scratch: Scratch,
) -> None:
    """Copies are pipelined only from addresses and strides that the compiler knows to be multiples of 16."""
    if not (query.is_contiguous() and out.is_contiguous()):
        raise ValueError("queries and outputs of attention are contiguous")
    if query.shape[1] % keys.shape[1]:
        raise ValueError(f"{query.shape[1]} heads do not share {keys.shape[1]} KV heads evenly")
    if keys.shape[2] < MIN_BLOCK_SIZE:
        raise ValueError(f"attention in Triton takes blocks of {MIN_BLOCK_SIZE} tokens or more, not of {keys.shape[2]}")
    for name, cache in (("keys", keys), ("values", values)):
        if not cache[0].is_contiguous():
            raise ValueError(f"the {name} of a block are not contiguous")
        if cache.stride(0) % 16 or cache.data_ptr() % 16:
            raise ValueError(
                f"the {name} begin at {cache.data_ptr()}, blocks {cache.stride(0)} apart: not multiples of 16"
            )
    requests, _, heads = scratch.largest.shape
    if requests < len(group.seq_lens) or heads != query.shape[1] or scratch.sums.shape[3] != out.shape[2]:
        raise ValueError(f"the scratch is for {requests} requests of {heads} heads")
