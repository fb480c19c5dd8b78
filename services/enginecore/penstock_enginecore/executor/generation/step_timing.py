"""How long steps take by the number of their tokens."""

import time
from collections.abc import Callable, Sequence

import torch

from penstock_enginecore.forward.base import ForwardPass
from penstock_enginecore.forward.probe import Probe, probe_logits

_CAREFUL_SECONDS, _MAX_SECONDS = 0.2, 0.4
"""So long each number of tokens is timed in three passes, then in two; after so long no more numbers are. The first pass grows
buffers, and says little: of 32 rows twice what the next one does.
"""


def time_steps(
    forward: ForwardPass, num_tokens: Sequence[int], max_len: int, clock: Callable[[], float] = time.perf_counter
) -> dict[int, float]:
    """Seconds of forward passes of a request's first tokens, all of whose logits are computed, on a cache of their own. Leaves
    ``forward`` without one. ``clock``: seconds.
    """
    block_size = next(iter(forward.specs.values())).block_size
    began = clock()
    found: dict[int, float] = {}
    for count in num_tokens:
        passed = clock() - began
        if count > max_len or passed > _MAX_SECONDS:
            break
        probe = Probe.largest(count, max_len, block_size)
        passes = 3 if passed < _CAREFUL_SECONDS else 2
        found[count] = min(_timed(forward, probe, clock) for _ in range(passes))
    return found


def _timed(forward: ForwardPass, probe: Probe, clock: Callable[[], float]) -> float:
    began = clock()
    logits = probe_logits(forward, probe)
    if logits.device.type == "cuda":
        torch.cuda.synchronize(logits.device)
    return clock() - began
