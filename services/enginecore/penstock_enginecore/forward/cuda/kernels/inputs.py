"""Inputs of a step in which every request decodes one token, made on the device: the tokens are those of the step before, which
the host need not know yet.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from penstock_enginecore.forward.cuda.launches import GroupInputs

_BLOCK = 128


@dataclass(frozen=True, slots=True)
class RowState:
    """What persists of requests from step to step: one row for each, as long as it runs. All contiguous, on the device.

    ``token_ids`` int32 ``[rows]``: the newest token, not computed yet. ``lengths`` int32 ``[rows]``: tokens before it, which is
    its position. ``output_indices`` int64 ``[rows]``: how many tokens have been sampled, which chooses the next random number.
    ``block_tables``: one per KV cache group, int32 ``[rows, blocks]``, with the blocks of the tokens to come.
    """

    token_ids: torch.Tensor
    lengths: torch.Tensor
    output_indices: torch.Tensor
    block_tables: tuple[torch.Tensor, ...]


def decode_inputs(
    state: RowState,
    rows: torch.Tensor,
    block_size: int,
    token_ids: torch.Tensor,
    positions: torch.Tensor,
    logit_rows: torch.Tensor,
    groups: tuple[GroupInputs, ...],
) -> None:
    """Write the inputs of a step that decodes the newest token of each of ``rows``, int32 ``[requests]`` in any order, each at
    most once, then -1 for padding; and advance ``state.lengths`` past them.

    Written are ``token_ids`` and ``positions`` int32 ``[requests]``, ``logit_rows`` int32 ``[requests]`` (each request's token),
    and all tensors of ``groups``, whose query_start_loc, seq_lens and block tables may be shared. Padding gets token and position
    0, a length of 0, no tokens, and a slot of -1. Of a block table only the blocks of the sequence are written. ValueError
    for other shapes.
    """
    requests = len(rows)
    if any(len(made) != requests for made in (token_ids, positions, logit_rows)):
        raise ValueError(
            f"{requests} rows for {len(token_ids)} token ids, {len(positions)} positions, {len(logit_rows)} rows"
        )
    if len(groups) != len(state.block_tables) or not groups:
        raise ValueError(f"{len(state.block_tables)} block tables for {len(groups)} KV cache groups")
    if not requests:
        return
    for held, group in zip(state.block_tables, groups, strict=True):
        if group.slots.shape != (requests,) or group.block_table.shape[0] != requests:
            raise ValueError(
                f"slots {list(group.slots.shape)}, blocks {list(group.block_table.shape)} of {requests} requests"
            )
        if group.block_table.shape[1] > held.shape[1]:
            raise ValueError(f"block tables of {group.block_table.shape[1]} blocks from those of {held.shape[1]}")
        _place[(requests,)](
            rows,
            state.token_ids,
            state.lengths,
            held,
            token_ids,
            positions,
            logit_rows,
            group.query_start_loc,
            group.seq_lens,
            group.slots,
            group.block_table,
            requests,
            block_size,
            held.stride(0),
            group.block_table.stride(0),
            ROWS=triton.next_power_of_2(requests),
            BLOCK=_BLOCK,
            num_warps=4,
        )
    _advance[(triton.cdiv(requests, _BLOCK),)](rows, state.lengths, requests, BLOCK=_BLOCK)


def keep_tokens(state: RowState, rows: torch.Tensor, sampled: torch.Tensor) -> None:
    """Make ``sampled``, int32 ``[requests]``, the newest tokens of ``rows``, int32 ``[requests]`` and -1 for padding, and count
    them in ``state.output_indices``. ValueError for other shapes.
    """
    if rows.shape != sampled.shape:
        raise ValueError(f"{list(sampled.shape)} tokens of {list(rows.shape)} rows")
    if len(rows):
        grid = (triton.cdiv(len(rows), _BLOCK),)
        _keep[grid](rows, sampled, state.token_ids, state.output_indices, len(rows), BLOCK=_BLOCK)


@triton.jit
def _place(
    rows,
    newest,
    lengths,
    held,
    token_ids,
    positions,
    logit_rows,
    query_start_loc,
    seq_lens,
    slots,
    block_table,
    requests,
    block_size,
    held_stride,
    table_stride,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per request. Several groups write the same numbers to what they share."""
    request = tl.program_id(0)
    row = tl.load(rows + request)
    real = row >= 0
    position = tl.load(lengths + row, mask=real, other=0)
    length = tl.where(real, position + 1, 0)
    tl.store(token_ids + request, tl.load(newest + row, mask=real, other=0))
    tl.store(positions + request, position)
    tl.store(logit_rows + request, request)
    tl.store(seq_lens + request, length)
    # Rows of padding come last: before request i there are i tokens, or all there are.
    others = tl.arange(0, ROWS)
    count = tl.sum((tl.load(rows + others, mask=others < requests, other=-1) >= 0).to(tl.int32), axis=0)
    tl.store(query_start_loc + request, tl.minimum(request, count))
    if request == requests - 1:
        tl.store(query_start_loc + requests, count)
    from_row = held + row.to(tl.int64) * held_stride
    to_row = block_table + request.to(tl.int64) * table_stride
    block = tl.load(from_row + position // block_size, mask=real, other=0).to(tl.int64)
    tl.store(slots + request, tl.where(real, block * block_size + position % block_size, -1))
    num_blocks = tl.cdiv(length, block_size)
    for start in range(0, num_blocks, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = columns < num_blocks
        tl.store(to_row + columns, tl.load(from_row + columns, mask=inside, other=0), mask=inside)


@triton.jit
def _advance(rows, lengths, requests, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(rows + index, mask=index < requests, other=-1)
    real = row >= 0
    tl.store(lengths + row, tl.load(lengths + row, mask=real, other=0) + 1, mask=real)


@triton.jit
def _keep(rows, sampled, newest, output_indices, requests, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = index < requests
    row = tl.load(rows + index, mask=inside, other=-1)
    real = row >= 0
    tl.store(newest + row, tl.load(sampled + index, mask=real, other=0), mask=real)
    tl.store(output_indices + row, tl.load(output_indices + row, mask=real, other=0) + 1, mask=real)
