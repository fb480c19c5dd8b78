"""Statistics of each worker of an engine, for metrics and operators."""

import msgspec

from penstock_common.observability.metrics import BucketCounts


class GraphStats(msgspec.Struct, frozen=True, kw_only=True):
    """Statistics of captured graphs (such as CUDA graphs), which a device replays. Counts are since the worker started.

    Attributes:
        captured: Number of captured graphs.
        captures: Number of captures that succeeded, including captures of graphs that were dropped later.
        failures: Number of captures that failed.
        replays: Number of steps that ran as replays of a graph.
        launched: Number of steps that could have been replays of a graph but were launched kernel by kernel.
        tokens: Number of tokens that replays computed, including padding.
        padding_tokens: Number of tokens that were added to fill up the shapes of captured graphs.
        padding_rows: Number of rows of logits that were added to fill up the shapes of captured graphs.
    """

    captured: int = 0
    captures: int = 0
    failures: int = 0
    replays: int = 0
    launched: int = 0
    tokens: int = 0
    padding_tokens: int = 0
    padding_rows: int = 0


class WorkerStats(msgspec.Struct, frozen=True, kw_only=True):
    """Statistics of one worker.

    Attributes:
        device: The name of the device in torch, such as "cuda:0", or empty before the model is loaded.
        total_memory: Size of the device memory in bytes, or 0 on a CPU.
        used_memory: Number of bytes of device memory that all processes together use, or 0 on a CPU.
        weight_bytes: Bytes used by this worker's weights.
        kv_cache_bytes: Bytes used by this worker's KV cache.
        step_broadcast: Histogram of the seconds that it took to send steps from the engine to the worker. None if the
            worker runs in the engine's process.
        collectives: Histogram of the seconds spent in each collective operation, by operation, if there are several
            workers.
        waited_for_stages: Seconds that the worker has waited for other pipeline stages since the worker started, or
            None with one stage.
        stage_idle: Fraction of the time with steps in flight in which the worker's pipeline stage computed nothing, or
            None with one stage.
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
