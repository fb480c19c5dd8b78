"""How long steps take by the number of their tokens."""

import time
from collections.abc import Sequence

import torch

from penstock_enginecore.forward.base import ForwardPass
from penstock_enginecore.forward.probe import Probe, probe_logits

_MAX_SECONDS, _TIMES = 0.3, 2
"""After so long no more numbers of tokens are timed; how often each is."""


def time_steps(forward: ForwardPass, num_tokens: Sequence[int], max_len: int) -> dict[int, float]:
    """Seconds of forward passes of a request's first tokens, all of whose logits are computed, on a cache of their own. Leaves
    ``forward`` without one.
    """
    block_size = next(iter(forward.specs.values())).block_size
    ends = time.perf_counter() + _MAX_SECONDS
    found: dict[int, float] = {}
    for count in num_tokens:
        if count > max_len or time.perf_counter() > ends:
            break
        probe = Probe.largest(count, max_len, block_size)
        probe_logits(forward, probe)
        found[count] = min(_timed(forward, probe) for _ in range(_TIMES))
    return found


def _timed(forward: ForwardPass, probe: Probe) -> float:
    began = time.perf_counter()
    logits = probe_logits(forward, probe)
    if logits.device.type == "cuda":
        torch.cuda.synchronize(logits.device)
    return time.perf_counter() - began
