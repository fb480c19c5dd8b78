"""How long a step takes."""

import time
from collections.abc import Callable

import torch

from penstock_enginecore.forward.base import ForwardPass
from penstock_enginecore.forward.probe import Probe, probe_logits


def fastest_pass(
    forward: ForwardPass, num_tokens: int, passes: int, clock: Callable[[], float] = time.perf_counter
) -> float:
    """Return the seconds of the fastest of so many ``passes`` over a request's first tokens, all of whose logits are computed, on
    a cache of their own. Leaves ``forward`` without one. ``clock``: seconds.
    """
    block_size = next(iter(forward.specs.values())).block_size
    probe = Probe.largest(num_tokens, num_tokens, block_size)
    return min(_timed(forward, probe, clock) for _ in range(passes))


def _timed(forward: ForwardPass, probe: Probe, clock: Callable[[], float]) -> float:
    began = clock()
    logits = probe_logits(forward, probe)
    if logits.device.type == "cuda":
        torch.cuda.synchronize(logits.device)
    return clock() - began
