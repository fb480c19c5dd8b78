"""Compilation of kernels by several concurrent processes, into the cache for later phases."""

import time
from functools import partial
from pathlib import Path
from typing import Any

from penstock_enginecore.forward.cuda.buffers import MAX_CAPTURED_TOKENS, decode_sizes
from tests.benchmarks.gpu.plans import PLANS
from tests.device.phases import Row, Settings, Stage

SHAPES = {"8B": "llama-8b", "1B": "llama-1b"}
"""Names of ``kernel_cache.shapes`` by this benchmark's names."""


def stages(settings: Settings) -> list[Stage]:
    """Return a row for each process. The sizes of decode steps are distributed over the processes."""
    if settings.shape not in SHAPES:
        return []
    plan = PLANS[settings.shape]
    all_sizes = decode_sizes(MAX_CAPTURED_TOKENS)
    streams = [row.streams for row in (*plan.decode, *plan.verify, *plan.adapted)]
    sizes = sorted({min(size for size in all_sizes if size >= count) for count in streams})
    parts = [part for i in range(settings.jobs) if (part := sizes[i :: settings.jobs])]
    return [
        Stage(
            "compile",
            [
                Row(f"decodes of {', '.join(map(str, part))}", partial(_compile, settings, part), 120.0)
                for part in parts
            ],
        )
    ]


def _compile(settings: Settings, sizes: list[int], _: None) -> dict[str, Any]:
    from triton import knobs

    from penstock_enginecore.kernel_cache.shapes import SHAPES as CACHED
    from penstock_enginecore.kernel_cache.two_layer_cache import use_cache
    from penstock_enginecore.kernel_cache.warm import warm

    if settings.capability is None:
        return {"says": "no compute capability: give --capability"}
    lookups = use_cache(Path(knobs.cache.dir))
    begun = time.monotonic()
    warm(CACHED[SHAPES[settings.shape]], settings.capability, "bfloat16", sizes)
    return {"compiled": lookups.compiled, "found": lookups.found, "compile_s": time.monotonic() - begun}
