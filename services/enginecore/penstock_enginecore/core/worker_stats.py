"""What each worker of an engine says of itself, for metrics and operators."""

import msgspec

from penstock_common.observability.metrics import BucketCounts


class GraphStats(msgspec.Struct, frozen=True, kw_only=True):
    """Steps that a device replays. ``captured``: graphs that there are. Since the start: ``replays``, and steps that were
    ``launched`` piece by piece, where they might have been replays; ``tokens`` that replays computed, ``padding_tokens`` among
    them because of their shapes, and ``padding_rows`` of logits.
    """

    captured: int = 0
    replays: int = 0
    launched: int = 0
    tokens: int = 0
    padding_tokens: int = 0
    padding_rows: int = 0


class WorkerStats(msgspec.Struct, frozen=True, kw_only=True):
    """``device``: as torch names it; empty before the model is loaded. ``total_memory`` and ``used_memory``: bytes of the device,
    all processes counted; 0 on a CPU, whose memory is the machine's. ``weight_bytes`` and ``kv_cache_bytes``: of these this
    worker's. ``step_broadcast``: seconds that steps took from the engine to the worker, None in the engine's own process.
    ``collectives``: seconds by operation, of a worker among several. ``waited_for_stages``: seconds since the start, of a worker
    among stages, and ``stage_idle``: the share of time, while there were steps, in which it computed nothing.
    """

    rank: int = 0
    up: bool = True
    device: str = ""
    device_name: str = ""
    total_memory: int = 0
    used_memory: int = 0
    weight_bytes: int = 0
    kv_cache_bytes: int = 0
    graphs: GraphStats = GraphStats()
    step_broadcast: BucketCounts | None = None
    collectives: dict[str, BucketCounts] = {}
    stage: int = 0
    waited_for_stages: float | None = None
    stage_idle: float | None = None
