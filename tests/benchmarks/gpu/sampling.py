"""Sampling on the device alone: time of each combination of filters, and tokens that differ from the CPU's sampler."""

from functools import partial
from typing import Any

import numpy as np
import torch

from penstock_enginecore.forward.cuda.sampler import DeviceLauncher
from penstock_enginecore.sample.base import DrawSettings, PlainDraws, SamplingInputs, uniforms
from penstock_enginecore.sample.sampler import TorchSampler
from tests.benchmarks.gpu import interpreter, machine, names
from tests.benchmarks.gpu.plans import plan_of
from tests.benchmarks.gpu.shapes import Plan
from tests.device.phases import Row, Settings, Stage

ROUNDS = 50
SPREAD = 4.0
"""Standard deviation of the logits, which gives about as many likely tokens as a trained model has."""


def stages(settings: Settings) -> list[Stage]:
    """Return a row for each number of rows of logits and each combination of filters."""
    interpreter.prepare(settings)
    plan, device = plan_of(settings), machine.pick(settings)
    rows = [
        Row(names.sampled(count, case), partial(_measure, plan, device, count, case))
        for count in plan.sampled
        for case in names.FILTERS
    ]
    return [Stage("sampling", rows)]


def draw_settings(rows: int, case: str) -> DrawSettings:
    """Return the parameters of ``rows`` rows for one of ``names.FILTERS``."""
    given = names.FILTERS[case]
    return DrawSettings(
        np.full(rows, given.temperature),
        np.full(rows, given.top_k, dtype=np.int64),
        np.full(rows, given.top_p),
        np.full(rows, given.min_p),
    )


@torch.inference_mode()
def _measure(plan: Plan, device: torch.device, rows: int, case: str, _: None) -> dict[str, Any]:
    """Return milliseconds, with the copy of the parameters, and the number of tokens that differ from the CPU's."""
    from penstock_enginecore.forward.cuda.kernels.sample import TokenSampler

    launcher = DeviceLauncher(plan.shape.vocab, device, TokenSampler)
    generator = torch.Generator(device).manual_seed(0)
    logits = torch.randn(rows, plan.shape.vocab, device=device, generator=generator) * SPREAD
    settings, seeds = draw_settings(rows, case), np.arange(rows, dtype=np.uint64)
    index = np.zeros(rows, dtype=np.int64)
    draws = PlainDraws.of(settings, seeds, index)
    found = launcher.launch(logits, draws).token_ids.cpu().numpy()
    expected = TorchSampler().sample(logits.cpu(), SamplingInputs(settings, uniforms(seeds, index))).token_ids
    rounds = ROUNDS if device.type == "cuda" else 1
    seconds = machine.seconds_in_a_row(
        device, lambda: launcher.launch(logits, draws), rounds=rounds, warm_up=min(3, rounds)
    )
    return {"ms": seconds * 1e3, "differing": int((found != expected).sum()), "rows": rows}
