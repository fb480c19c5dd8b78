"""Limits, loads and variants of the engines, as far as the frontend knows them."""

from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec

from penstock_common.observability.metrics import EngineLoad
from penstock_common.types.cluster import ClusterView, EngineStatus
from penstock_common.types.data_parallel import PoolGroup
from penstock_common.types.media import MODALITIES, MediaLimits, Modality
from penstock_common.types.outputs import EngineReady, SchedulerStats
from penstock_frontend.dispatch.connection import EngineConnection
from penstock_frontend.dispatch.pool import EnginePool
from penstock_frontend.dispatch.router import Router
from penstock_frontend.interfaces import ModelLimits, RankLoad, Variant


def variants_of(engines: Iterable[EngineReady]) -> list[Variant]:
    """Return the distinct variants of these engines, sorted by configuration hash."""
    found: dict[str, list[EngineReady]] = {}
    for engine in engines:
        found.setdefault(engine.config_hash, []).append(engine)
    configs = {config_hash: of_hash[0].config for config_hash, of_hash in found.items()}
    differing = _differing([config for config in configs.values() if config])
    return [
        Variant(
            config_hash=config_hash,
            engine_ids=tuple(sorted(engine.engine_id for engine in found[config_hash])),
            differs={key: configs[config_hash].get(key, "") for key in differing if configs[config_hash]},
        )
        for config_hash in sorted(found)
    ]


def _differing(configs: Sequence[Mapping[str, str]]) -> list[str]:
    keys = sorted({key for config in configs for key in config})
    return [key for key in keys if len({config.get(key, "") for config in configs}) > 1]


def describe_variants(variants: Iterable[Variant]) -> str:
    """Return a one-line description of the variants, with the engines of each variant."""
    return "; ".join(
        f"{', '.join(variant.engine_ids)}: {_values(variant)} ({variant.config_hash or 'no config_hash'})"
        for variant in variants
    )


def _values(variant: Variant) -> str:
    told = [f"{key}={value or 'not there'}" for key, value in variant.differs.items()]
    return ", ".join(told) or "does not report its settings"


class EngineLoads:
    """Limits, loads and variants of the engines of a pool. Implements ``EngineView``.

    The request counts come from the router. For each engine, the router starts from the engine's last frame, or from a
    later view of the coordinator. The router adds the requests that this frontend has sent to the engine since then.
    """

    def __init__(self, pool: EnginePool, router: Router) -> None:
        self._pool = pool
        self._router = router
        self._viewed: dict[str, tuple[object, ...]] = {}
        """Load of each engine in the coordinator's last view, by address."""

    @property
    def limits(self) -> ModelLimits | None:
        """Limits that every connected engine supports, or None without engines.

        ``max_model_len`` depends on an engine's memory, so the result has the smallest ``max_model_len`` of all
        engines.
        """
        ready = [ready for _, ready in self._ready()]
        if not ready:
            return None
        hidden_sizes = [r.hidden_size for r in ready if r.hidden_size is not None]
        return ModelLimits(
            min(r.max_model_len for r in ready),
            min(r.vocab_size for r in ready),
            max(hidden_sizes, default=None),
            max(r.embedding_size or 0 for r in ready),
            _media_limits(ready),
        )

    @property
    def capabilities(self) -> Sequence[str]:
        """Capabilities that at least one connected engine has, sorted."""
        return sorted({word for _, ready in self._ready() for word in ready.capabilities})

    def serving(self, capability: str) -> Sequence[str]:
        return sorted(ready.engine_id for _, ready in self._ready() if capability in ready.capabilities)

    @property
    def connected(self) -> Sequence[str]:
        """Ids of the connected engines."""
        return [ready.engine_id for _, ready in self._ready()]

    @property
    def num_engines(self) -> int:
        return sum(candidate.accepting for candidate in self._pool.candidates())

    def cluster(self) -> Sequence[EngineStatus]:
        """Return the status of every engine that has its own address.

        For engines of this frontend's pool, the status comes from the pool. For other engines, the status comes from
        the coordinator's view.
        """
        known = {connection.address: self._status(connection) for connection in self._pool}
        told = self._pool.view.engines
        return [*known.values(), *(status for status in told if status.address not in known)]

    def groups(self) -> Sequence[PoolGroup]:
        """Return the data-parallel groups in the coordinator's latest view."""
        return self._pool.view.groups

    def variants(self) -> list[Variant]:
        return variants_of(ready for _, ready in self._ready())

    def rank_loads(self) -> Sequence[RankLoad]:
        loads = []
        for connection, ready in self._ready():
            if connection.rank is None:
                continue
            load = self._router.load(connection.address)
            loads.append(
                RankLoad(
                    rank=connection.rank,
                    num_running_reqs=load.running,
                    num_waiting_reqs=load.waiting,
                    kv_cache_usage=load.kv_cache_usage,
                    capacity=ready.num_kv_blocks * ready.block_size,
                    max_running=ready.max_num_seqs,
                    cache_hit_rate=connection.stats.prefix_cache_hit_rate,
                )
            )
        return sorted(loads, key=lambda load: load.rank)

    def for_metrics(self) -> list[EngineLoad]:
        """Return the load of each connected engine, for metrics."""
        return [
            EngineLoad(
                model=ready.model,
                engine=ready.engine_id,
                num_kv_blocks=ready.num_kv_blocks,
                block_size=ready.block_size,
                max_num_seqs=ready.max_num_seqs,
                stats=self._stats(connection),
            )
            for connection, ready in self._ready()
        ]

    def report(self, connection: EngineConnection, stats: SchedulerStats) -> None:
        """Record the load that an engine reports in a frame of outputs."""
        connection.stats = stats
        self._router.report(
            connection.address,
            waiting=stats.num_waiting_reqs,
            running=stats.num_running_reqs,
            kv_cache_usage=stats.kv_cache_usage,
            pending_embeds=0 if stats.media is None else stats.media.pending_embeds,
        )
        if stats.lora is not None:
            self._router.loras.holds(connection.address, stats.lora.num_cached + stats.lora.num_loading_reqs)
            if stats.lora.held is not None:
                self._router.loras.told(connection.address, stats.lora.held)

    def report_view(self, view: ClusterView) -> None:
        """Record the loads of the engines in a coordinator's view. Forget engines that neither the pool nor the view
        lists.

        Ignore the load of an engine if it is the same as in the previous view. A hung engine reports no new load. Its
        old load must not reset the count of requests that this frontend has sent to the engine since.
        """
        viewed = {status.address: _reported(status) for status in view.engines}
        before, self._viewed = self._viewed, viewed
        for status in view.engines:
            if before.get(status.address) == viewed[status.address]:
                continue
            self._router.report(
                status.address,
                waiting=status.num_waiting_reqs,
                running=status.num_running_reqs,
                kv_cache_usage=status.kv_cache_usage,
            )
        self._take_loras(view)
        self._router.keep_only(connection.address for connection in self._pool)

    def _take_loras(self, view: ClusterView) -> None:
        """Record the LoRA adapters that engines reported to the coordinator. Ignore reports from earlier incarnations
        of an engine.
        """
        incarnations = {connection.address: ready.incarnation for connection, ready in self._ready()}
        for status in view.engines:
            if status.loras is not None and incarnations.get(status.address) == status.incarnation:
                self._router.loras.told(status.address, status.loras)

    def _ready(self) -> Iterator[tuple[EngineConnection, EngineReady]]:
        """Yield each engine that has a session, with the greeting that the engine sent."""
        for connection in self._pool.connected():
            if connection.ready is not None:
                yield connection, connection.ready

    def _stats(self, connection: EngineConnection) -> SchedulerStats:
        # the router's load is newer than the last frame if a coordinator's view arrived after the frame
        load = self._router.load(connection.address)
        return msgspec.structs.replace(
            connection.stats,
            num_waiting_reqs=load.waiting,
            num_running_reqs=load.running,
            kv_cache_usage=load.kv_cache_usage,
        )

    def _status(self, connection: EngineConnection) -> EngineStatus:
        ready, load = connection.ready, self._router.load(connection.address)
        base = connection.status or EngineStatus(engine_id="", incarnation="", address=connection.address)
        if ready is not None:
            base = msgspec.structs.replace(
                base,
                engine_id=ready.engine_id,
                incarnation=ready.incarnation,
                model=ready.model,
                role=ready.role,
                kv_address=ready.kv_address,
                kv_fingerprint=ready.kv_fingerprint,
            )
        return msgspec.structs.replace(
            base,
            state=connection.state,
            index=base.index if connection.rank is None else connection.rank,
            num_waiting_reqs=load.waiting,
            num_running_reqs=load.running,
            kv_cache_usage=load.kv_cache_usage,
        )


def _reported(status: EngineStatus) -> tuple[object, ...]:
    """Return the fields of an engine's status that change when the engine reports its load."""
    return (
        status.incarnation,
        status.num_waiting_reqs,
        status.num_running_reqs,
        status.kv_cache_usage,
        status.seconds_since_last_step,
    )


def _media_limits(ready: Sequence[EngineReady]) -> tuple[MediaLimits, ...]:
    """Return, for each modality, the smallest media limits among the engines that accept this modality."""
    limits: dict[Modality, MediaLimits] = {}
    for each in (each for engine in ready for each in engine.media):
        known = limits.get(each.modality, each)
        limits[each.modality] = MediaLimits(
            modality=each.modality,
            max_items=min(known.max_items, each.max_items),
            max_tokens=min(known.max_tokens, each.max_tokens),
        )
    return tuple(limits[modality] for modality in MODALITIES if modality in limits)
