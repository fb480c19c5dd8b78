"""What a step costs that verifies drafts: several new tokens of each stream, beside a step of one."""

from typing import Any

import numpy as np
import torch

from penstock_enginecore.attention.base import AttentionMetadata
from penstock_enginecore.forward.base import ForwardBatch, ForwardPass
from tests.benchmarks.gpu import machine, passes
from tests.benchmarks.gpu.shapes import BLOCK_SIZE, Plan, Row

ROUNDS = 20


def measure(plan: Plan, device: torch.device) -> dict[str, Any]:
    """Milliseconds of a step by streams, context and tokens of each stream."""
    with passes.forward_pass(plan, device) as (forward, computing):
        found = [_time(forward, plan, row, tokens, device) for row in plan.verify for tokens in plan.verified]
    return {"computing": computing, "verify": found}


def _time(forward: ForwardPass, plan: Plan, row: Row, tokens: int, device: torch.device) -> dict[str, Any]:
    batch, rows = verify_batch(plan, row, tokens)
    with passes.cache(forward, passes.blocks(row)), torch.inference_mode():
        seconds = machine.seconds_in_a_row(device, lambda: forward.run(batch, rows), rounds=ROUNDS)
    return {"streams": row.streams, "context": row.context, "tokens": tokens, "ms": seconds * 1e3}


def verify_batch(plan: Plan, row: Row, tokens: int) -> tuple[ForwardBatch, np.ndarray[Any, np.dtype[np.int64]]]:
    """The last ``tokens`` of each stream of ``row``, every one with logits."""
    decode, _ = passes.decode_batch(plan, row)
    (of_one,) = decode.attention
    last = np.arange(row.context - tokens, row.context)
    slots = of_one.block_table[:, last // BLOCK_SIZE].astype(np.int64) * BLOCK_SIZE + last % BLOCK_SIZE
    count = row.streams * tokens
    metadata = AttentionMetadata(
        np.arange(row.streams + 1) * tokens, of_one.seq_lens, of_one.block_table, slots.ravel(), BLOCK_SIZE
    )
    token_ids = np.random.default_rng(1).integers(plan.shape.vocab, size=count)
    return ForwardBatch(token_ids, np.tile(last, row.streams), [metadata]), np.arange(count)
