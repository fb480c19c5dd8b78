"""Lays tokens out flat for a forward pass."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from penstock_enginecore.attention.base import AttentionMetadata, IntArray


@dataclass(frozen=True, slots=True)
class LaidOut:
    """Tokens of requests, flat: where those of each request begin, int64 ``[requests + 1]``, and of each token the row of the
    batch and the position, int64 ``[tokens]``. ``attention``: one entry per KV cache group.
    """

    query_start_loc: IntArray
    rows: IntArray
    positions: IntArray
    attention: list[AttentionMetadata]


def lay_out(
    block_tables: Sequence[npt.NDArray[np.int32]],
    block_size: int,
    rows: IntArray,
    computed: IntArray,
    lengths: IntArray,
    ahead: int = 0,
) -> LaidOut:
    """``lengths`` tokens of each of ``rows`` from position ``computed`` on, int64 ``[requests]`` each. ``block_tables``: one
    per KV cache group, ``[rows, blocks]``; those of the metadata go on for ``ahead`` positions behind the tokens.
    """
    query_start_loc = np.zeros(len(rows) + 1, dtype=np.int64)
    np.cumsum(lengths, out=query_start_loc[1:])
    seq_lens = computed + lengths
    token_rows = np.repeat(rows, lengths)
    positions = np.arange(query_start_loc[-1]) + np.repeat(computed - query_start_loc[:-1], lengths)
    blocks_used = -(-(int(seq_lens.max(initial=0)) + ahead) // block_size)
    attention = []
    for table in block_tables:
        blocks = table[token_rows, positions // block_size].astype(np.int64)
        slots = blocks * block_size + positions % block_size
        attention.append(AttentionMetadata(query_start_loc, seq_lens, table[rows, :blocks_used], slots, block_size))
    return LaidOut(query_start_loc, token_rows, positions, attention)


def rows_before(ends: IntArray, drafts: Sequence[Sequence[int]]) -> IntArray:
    """Of requests whose tokens end at ``ends`` of a flat batch, those whose logits choose the next token behind each of their
    drafts, and behind none: int64 ``[drafts and requests]``.
    """
    counts = np.fromiter(map(len, drafts), dtype=np.int64, count=len(drafts)) + 1
    first = np.repeat(ends - counts, counts)
    return first + np.arange(len(first)) - np.repeat(np.cumsum(counts) - counts, counts)
