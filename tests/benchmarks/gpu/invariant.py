"""The price of ``kernels.batch_invariant``, and whether the device keeps it: logits alone and in a crowd, bit by bit."""

from typing import Any

import numpy as np
import torch

from penstock_enginecore.attention.base import AttentionMetadata
from penstock_enginecore.config import KernelsConfig
from penstock_enginecore.forward.base import ForwardBatch, ForwardPass
from tests.benchmarks.gpu import passes
from tests.benchmarks.gpu.shapes import BLOCK_SIZE, Plan, Prefill, Row


def measure(plan: Plan, device: torch.device) -> dict[str, Any]:
    """Milliseconds of each row, and of the prompts, as ``passes`` measures them; ``same_bits``: whether the first stream's logits
    are those that it has alone, and a prompt's last token's those of a decode of it.
    """
    with passes.forward_pass(plan, device, KernelsConfig(batch_invariant=True)) as (forward, computing):
        decode = passes.fitting(
            plan.decode,
            lambda row: passes.time_decode(forward, plan, row, device) | {"same_bits": _alone(forward, plan, row)},
        )
        prefill = passes.fitting(
            plan.prefill,
            lambda each: (
                passes.time_prefill(forward, plan, each, device) | {"same_bits": _decoded(forward, plan, each)}
            ),
        )
    return {"computing": computing, "decode": decode, "prefill": prefill}


@torch.inference_mode()
def _alone(forward: ForwardPass, plan: Plan, row: Row) -> bool:
    batch, rows = passes.decode_batch(plan, row)
    with passes.cache(forward, passes.blocks(row)):
        together = forward.run(batch, rows).logits[0].clone()
        return torch.equal(forward.run(_one_token(batch, 0), rows[:1]).logits[0], together)


@torch.inference_mode()
def _decoded(forward: ForwardPass, plan: Plan, prefill: Prefill) -> bool:
    batch, rows = passes.prefill_batch(plan, prefill)
    with passes.cache(forward, 1 + -(-prefill.tokens // BLOCK_SIZE)):
        of_prompt = forward.run(batch, rows).logits[0].clone()
        last = _one_token(batch, prefill.tokens - 1)
        return torch.equal(forward.run(last, np.array([0])).logits[0], of_prompt)


def _one_token(batch: ForwardBatch, token: int) -> ForwardBatch:
    """A step of one token of the first request of ``batch`` alone."""
    (metadata,) = batch.attention
    here = slice(token, token + 1)
    alone = AttentionMetadata(
        np.array([0, 1]),
        batch.positions[here] + 1,
        metadata.block_table[:1],
        metadata.slot_mapping[here],
        metadata.block_size,
    )
    return ForwardBatch(batch.token_ids[here], batch.positions[here], [alone])
