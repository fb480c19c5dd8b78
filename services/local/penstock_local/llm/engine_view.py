"""What is known of the engine in this process."""

from collections.abc import Callable, Sequence

from penstock_common.types.cluster import EngineState, EngineStatus
from penstock_common.types.data_parallel import PoolGroup
from penstock_common.types.outputs import EngineReady
from penstock_enginecore.core.busy_loop import BusyLoop
from penstock_frontend.ports import ModelLimits, RankLoad, Variant


class InProcessView:
    """The ``EngineView`` of one engine, whose ``usable`` says whether it takes requests. May be read from any thread."""

    def __init__(self, busy_loop: BusyLoop, ready: EngineReady, usable: Callable[[], bool]) -> None:
        self._busy_loop = busy_loop
        self._ready = ready
        self._usable = usable

    @property
    def limits(self) -> ModelLimits:
        """What the engine can take."""
        return ModelLimits(self._ready.max_model_len, self._ready.vocab_size, self._ready.hidden_size)

    @property
    def capabilities(self) -> Sequence[str]:
        """What the engine serves."""
        return self._ready.capabilities

    def serving(self, capability: str) -> Sequence[str]:
        """The engine's id, if it serves that."""
        return [self._ready.engine_id] if capability in self._ready.capabilities else []

    @property
    def num_engines(self) -> int:
        """1 while the engine takes requests, else 0."""
        return int(self._usable())

    def cluster(self) -> Sequence[EngineStatus]:
        """The engine, which has no address."""
        stats = self._busy_loop.stats()
        return [
            EngineStatus(
                engine_id=self._ready.engine_id,
                incarnation=self._ready.incarnation,
                address="",
                state=EngineState.SERVING if self._usable() else EngineState.DEAD,
                num_waiting_reqs=stats.num_waiting_reqs,
                num_running_reqs=stats.num_running_reqs,
                kv_cache_usage=stats.kv_cache_usage,
                seconds_since_last_step=self._busy_loop.seconds_since_last_step(),
                model=self._ready.model,
            )
        ]

    def variants(self) -> Sequence[Variant]:
        """The engine's own: there is nothing that it differs from."""
        return [Variant(config_hash=self._ready.config_hash, engine_ids=(self._ready.engine_id,), differs={})]

    def groups(self) -> Sequence[PoolGroup]:
        """It computes alone."""
        return ()

    def rank_loads(self) -> Sequence[RankLoad]:
        """The engine's load, as rank 0."""
        stats, ready = self._busy_loop.stats(), self._ready
        return [
            RankLoad(
                rank=0,
                num_running_reqs=stats.num_running_reqs,
                num_waiting_reqs=stats.num_waiting_reqs,
                kv_cache_usage=stats.kv_cache_usage,
                capacity=ready.num_kv_blocks * ready.block_size,
                max_running=ready.max_num_seqs,
                cache_hit_rate=stats.prefix_cache_hit_rate,
            )
        ]
