"""The forward pass of models with experts: decode steps and a prompt, and whether steps are replayed from graphs."""

from dataclasses import replace
from functools import partial

from tests.benchmarks.gpu import machine, names, passes
from tests.benchmarks.gpu.decoder import decoder
from tests.benchmarks.gpu.plans import plan_of
from tests.device.phases import Row, Settings, Stage


def stages(settings: Settings) -> list[Stage]:
    """Return a stage for each shape with experts."""
    plan, device = plan_of(settings), machine.pick(settings)
    found = []
    for shape in plan.mixtures:
        rows = [Row(names.of_shape(shape, row.name), partial(passes.decode, row=row)) for row in plan.mixed_decode]
        prompt = plan.mixed_prompt
        rows.append(Row(names.of_shape(shape, prompt.name), partial(passes.prefill, prompt=prompt)))
        own = replace(plan, shape=shape)
        found.append(Stage(shape.name, rows, partial(decoder, own, device), passes.BUILD_LIMIT))
    return found
