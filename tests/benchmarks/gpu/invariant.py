"""The price of ``kernels.batch_invariant``, and whether the device keeps it: logits alone and in a batch, bit by bit."""

from functools import partial
from typing import Any

import numpy as np
import torch

from penstock_enginecore.attention.base import AttentionMetadata
from penstock_enginecore.config import KernelsConfig
from penstock_enginecore.forward.base import ForwardBatch
from penstock_enginecore.native.library import KernelsError, find_library
from tests.benchmarks.gpu import machine, passes
from tests.benchmarks.gpu.batches import blocks, decode_batch, prefill_batch, prefill_blocks
from tests.benchmarks.gpu.decoder import Decoder, cache, decoder
from tests.benchmarks.gpu.plans import plan_of
from tests.benchmarks.gpu.shapes import DecodeRow, Prefill
from tests.device.phases import Row, Settings, Stage


def stages(settings: Settings) -> list[Stage]:
    """Return the decode steps and prompts of ``passes``. ``same_bits``: whether the first stream's logits are those that it has
    alone, and those of a prompt's last token those of a decode step of it. There are none on a CPU without compiled kernels,
    which alone are batch-invariant there.
    """
    if settings.cpu and not _has_kernels():
        return []
    plan, device = plan_of(settings), machine.pick(settings)
    rows = [Row(row.name, partial(_decode, row=row)) for row in plan.decode]
    rows += [Row(prompt.name, partial(_prefill, prompt=prompt)) for prompt in plan.prefill]
    build = partial(decoder, plan, device, KernelsConfig(batch_invariant=True))
    return [Stage("model", rows, build, passes.BUILD_LIMIT)]


def _has_kernels() -> bool:
    try:
        find_library("auto")
    except KernelsError:
        return False
    return True


@torch.inference_mode()
def _decode(model: Decoder, row: DecodeRow) -> dict[str, Any]:
    batch, rows = decode_batch(model.plan, row)
    with cache(model.forward, blocks(row)):
        together = model.forward.run(batch, rows).logits[0].clone()
        same = torch.equal(model.forward.run(_one_token(batch, 0), rows[:1]).logits[0], together)
    return passes.decode(model, row) | {"same_bits": same, "ok": same}


@torch.inference_mode()
def _prefill(model: Decoder, prompt: Prefill) -> dict[str, Any]:
    batch, rows = prefill_batch(model.plan, prompt)
    with cache(model.forward, prefill_blocks(prompt)):
        of_prompt = model.forward.run(batch, rows).logits[0].clone()
        last = _one_token(batch, prompt.tokens - 1)
        same = torch.equal(model.forward.run(last, np.array([0])).logits[0], of_prompt)
    return passes.prefill(model, prompt) | {"same_bits": same, "ok": same}


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
