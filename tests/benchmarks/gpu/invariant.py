"""Cost of ``kernels.batch_invariant``, and a bitwise comparison of logits alone and in a batch on the device."""

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
    """Return the decode steps and prompts of ``passes``, computed with batch-invariant kernels.

    ``same_bits`` says whether two pairs of logits are bitwise equal. The first pair is the first stream's logits in the
    batch and alone. The second pair is the logits of a prompt's last token, computed in the prompt and in a decode
    step. On a CPU, only compiled kernels are batch-invariant, so without them there are no rows.
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
    """Return a step of one token for only the first request of ``batch``."""
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
