"""Batches for a model shape: decode steps, prompts, and steps that verify drafts."""

from typing import Any

import numpy as np

from penstock_enginecore.attention.base import AttentionMetadata
from penstock_enginecore.forward.base import ForwardBatch
from tests.benchmarks.gpu.shapes import BLOCK_SIZE, DecodeRow, Plan, Prefill

Rows = np.ndarray[Any, np.dtype[np.int64]]


def decode_batch(plan: Plan, row: DecodeRow) -> tuple[ForwardBatch, Rows]:
    """Return a batch with the next token of each stream, and the rows that need logits.

    The blocks of a stream are scattered over the cache.
    """
    random = np.random.default_rng(0)
    per_stream = -(-row.context // BLOCK_SIZE)
    order = 1 + random.permutation(row.streams * per_stream).astype(np.int32)
    table = order.reshape(row.streams, per_stream)
    last = row.context - 1
    metadata = AttentionMetadata(
        np.arange(row.streams + 1),
        np.full(row.streams, row.context),
        table,
        table[:, last // BLOCK_SIZE].astype(np.int64) * BLOCK_SIZE + last % BLOCK_SIZE,
        BLOCK_SIZE,
    )
    token_ids = random.integers(plan.shape.vocab, size=row.streams)
    return ForwardBatch(token_ids, np.full(row.streams, last), [metadata]), np.arange(row.streams)


def prefill_batch(plan: Plan, prefill: Prefill) -> tuple[ForwardBatch, Rows]:
    """Return a batch with a prompt, and the row of the prompt's last token."""
    count = prefill.tokens
    table = 1 + np.arange(-(-count // BLOCK_SIZE), dtype=np.int32)[None]
    positions = np.arange(count)
    metadata = AttentionMetadata(np.array([0, count]), np.array([count]), table, BLOCK_SIZE + positions, BLOCK_SIZE)
    token_ids = np.random.default_rng(0).integers(plan.shape.vocab, size=count)
    return ForwardBatch(token_ids, positions, [metadata]), np.array([count - 1])


def verify_batch(plan: Plan, row: DecodeRow, tokens: int) -> tuple[ForwardBatch, Rows]:
    """Return a batch with the last ``tokens`` tokens of each stream of ``row``. All tokens have logits."""
    decode, _ = decode_batch(plan, row)
    (of_one,) = decode.attention
    last = np.arange(row.context - tokens, row.context)
    slots = of_one.block_table[:, last // BLOCK_SIZE].astype(np.int64) * BLOCK_SIZE + last % BLOCK_SIZE
    count = row.streams * tokens
    metadata = AttentionMetadata(
        np.arange(row.streams + 1) * tokens, of_one.seq_lens, of_one.block_table, slots.ravel(), BLOCK_SIZE
    )
    token_ids = np.random.default_rng(1).integers(plan.shape.vocab, size=count)
    return ForwardBatch(token_ids, np.tile(last, row.streams), [metadata]), np.arange(count)


def blocks(row: DecodeRow) -> int:
    """Return the number of cache blocks for ``row``, including the null block."""
    return 1 + row.streams * -(-row.context // BLOCK_SIZE)


def prefill_blocks(prefill: Prefill) -> int:
    """Return the number of cache blocks for ``prefill``, including the null block."""
    return 1 + -(-prefill.tokens // BLOCK_SIZE)
