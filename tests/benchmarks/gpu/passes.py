"""The forward pass alone, with a KV cache of random numbers.

The rows are decode steps, steps that verify drafts, prompts, decode steps without graphs or without dependent launch,
and the idle time of the device. All rows use one model.
"""

from functools import partial
from typing import Any

import torch

from tests.benchmarks.gpu import machine, names
from tests.benchmarks.gpu.batches import blocks, decode_batch, prefill_batch, prefill_blocks, verify_batch
from tests.benchmarks.gpu.decoder import ROUNDS, Decoder, cache, decoder
from tests.benchmarks.gpu.plans import plan_of
from tests.benchmarks.gpu.sampling import draw_settings
from tests.benchmarks.gpu.shapes import DecodeRow, Prefill
from tests.device.phases import Row, Settings, Stage

TRACED = 20
BUILD_LIMIT = 90.0


def stages(settings: Settings) -> list[Stage]:
    """Return the rows. A CPU has neither graphs nor a profiler that measures its idle time."""
    plan, device = plan_of(settings), machine.pick(settings)
    rows = [Row(row.name, partial(decode, row=row)) for row in plan.decode]
    rows += [Row(prompt.name, partial(prefill, prompt=prompt)) for prompt in plan.prefill]
    rows += [
        Row(names.verify(row, tokens), partial(_verify, row=row, tokens=tokens))
        for row in plan.verify
        for tokens in plan.verified
    ]
    if not settings.cpu:
        rows.append(Row(names.IDLE, partial(_idle, row=names.idle_row(plan))))
        rows += [Row(names.launched(row), partial(_launched, row=row)) for row in names.launched_rows(plan)]
        rows += [Row(names.serial(row), partial(_serial, row=row)) for row in names.launched_rows(plan)]
        rows += [Row(names.filtered(row), partial(_filtered, row=row)) for row in names.launched_rows(plan)]
    return [Stage("model", rows, partial(decoder, plan, device), BUILD_LIMIT)]


@torch.inference_mode()
def decode(model: Decoder, row: DecodeRow) -> dict[str, Any]:
    """Return milliseconds of a decode step."""
    step = model.step(*decode_batch(model.plan, row))
    with cache(model.forward, blocks(row)):
        return model.timed(step, alone=True)


@torch.inference_mode()
def prefill(model: Decoder, prompt: Prefill) -> dict[str, Any]:
    """Return the milliseconds of a prompt. Each prompt is awaited, because in an engine other work runs between
    prompts.
    """
    step = model.step(*prefill_batch(model.plan, prompt), per_stream=None)
    rounds = max(5, ROUNDS // 3)
    with cache(model.forward, prefill_blocks(prompt)):
        found = model.timed(step, rounds=rounds, alone=True, replays=False)
    return {**found, "ms": found.pop("alone_ms")}


@torch.inference_mode()
def _verify(model: Decoder, row: DecodeRow, tokens: int) -> dict[str, Any]:
    step = model.step(*verify_batch(model.plan, row, tokens), per_stream=tokens)
    with cache(model.forward, blocks(row)):
        return model.timed(step)


@torch.inference_mode()
def _launched(model: Decoder, row: DecodeRow) -> dict[str, Any]:
    step = model.step(*decode_batch(model.plan, row))
    with model.launched(), cache(model.forward, blocks(row)):
        return model.timed(step, replays=False)


@torch.inference_mode()
def _serial(model: Decoder, row: DecodeRow) -> dict[str, Any]:
    step = model.step(*decode_batch(model.plan, row))
    with model.serial(), cache(model.forward, blocks(row)):
        return model.timed(step)


@torch.inference_mode()
def _filtered(model: Decoder, row: DecodeRow) -> dict[str, Any]:
    """Return the milliseconds of a decode step in which every stream has filters."""
    step = model.step(*decode_batch(model.plan, row), settings=draw_settings(row.streams, names.FILTERED))
    with cache(model.forward, blocks(row)):
        return model.timed(step)


@torch.inference_mode()
def _idle(model: Decoder, row: DecodeRow) -> dict[str, Any]:
    """Return the fraction of idle time of the device during decode steps, and the number of launches per step."""
    step = model.step(*decode_batch(model.plan, row))
    with cache(model.forward, blocks(row)):
        found = model.timed(step)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            for _ in range(TRACED):
                step()
            machine.synchronize(model.device)
    spans = sorted(
        (event.time_range.start, event.time_range.end) for event in profile.events() if event.device_type.name == "CUDA"
    )
    return {**found, "streams": row.streams, "launches": len(spans) / TRACED, "idle": share_idle(spans)}


def share_idle(spans: list[tuple[float, float]]) -> float:
    """Return the fraction of time that no span covers, between the first begin and the last end. ``spans`` are sorted
    by begin.
    """
    busy, end = 0.0, spans[0][0]
    for begun, ended in spans:
        busy += max(0.0, ended - max(begun, end))
        end = max(end, ended)
    return 1 - busy / (end - spans[0][0])
