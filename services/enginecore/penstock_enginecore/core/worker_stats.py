"""Statistics of each worker of an engine, for metrics and operators."""

import msgspec

from penstock_common.observability.metrics import BucketCounts


class GraphStats(msgspec.Struct, frozen=True, kw_only=True):
    """Statistics of captured graphs, which a device replays. Counts are since the start.

    Attributes:
        captured: Number of graphs.
        replays: Steps that were replayed.
        launched: Steps that could have been replays but were launched kernel by kernel.
        tokens: Tokens that replays computed, including padding.
        padding_tokens: Tokens that were added as padding.
        padding_rows: Rows of logits that were added as padding.
    """

    captured: int = 0
    replays: int = 0
    launched: int = 0
    tokens: int = 0
    padding_tokens: int = 0
    padding_rows: int = 0


class WorkerStats(msgspec.Struct, frozen=True, kw_only=True):
    """Statistics of one worker.

    Attributes:
        device: The torch name of the device, or empty before the model is loaded.
        total_memory: Bytes of the device, or 0 on a CPU.
        used_memory: Bytes used on the device by all processes, or 0 on a CPU.
        weight_bytes: Bytes used by this worker's weights.
        kv_cache_bytes: Bytes used by this worker's KV cache.
        step_broadcast: Seconds that steps took from the engine to the worker, or None in the engine's own process.
        collectives: Seconds by operation, if there are several workers.
        waited_for_stages: Seconds spent waiting for other pipeline stages since the start, or None with one stage.
        stage_idle: Fraction of the time with steps in which the stage computed nothing, or None with one stage.
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
