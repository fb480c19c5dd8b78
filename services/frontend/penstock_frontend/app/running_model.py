"""A model of a running frontend: its components, its connections to engines, and its session with the coordinator."""

import asyncio
import uuid
from collections.abc import Callable

from penstock_common.observability.logging import get_logger
from penstock_common.observability.tracing import Tracer
from penstock_common.rpc.credentials import ClientCredentials
from penstock_common.security.tls import Certificates
from penstock_frontend.app.assembly import Assembly, AssemblyConfig, assemble, served_model
from penstock_frontend.calls.adapters import AdapterDirectory
from penstock_frontend.config import FrontendConfig
from penstock_frontend.dispatch.client import GrpcEngineClient
from penstock_frontend.dispatch.kv_events import KvEventFeed
from penstock_frontend.interfaces import OutputHandler
from penstock_frontend.metrics import FrontendMetrics
from penstock_frontend.rpc.coordinator_client import CoordinatorClient
from penstock_frontend.served_models import ServedModel


class RunningModel:
    """A model of a frontend. Each model has its own engines, limits on requests in flight, and metrics.

    Call ``begin``, then ``follow_engines``. At the end, call ``end_requests``, and ``close`` once the servers have
    stopped.
    """

    def __init__(
        self,
        config: FrontendConfig,
        *,
        tracer: Tracer | None,
        certificates: Certificates,
        on_change: Callable[[], None],
        first: Assembly[GrpcEngineClient] | None,
    ) -> None:
        """Read the files of the model, which may take a long time. Raises ConfigError if the configuration or a file is
        not valid.

        Args:
            config: the configuration of the frontend for this model, from ``FrontendConfig.per_model``.
            tracer: the tracer of trace spans. None if tracing is off.
            certificates: records when the certificates of connections expire.
            on_change: called whenever the model may have become ready or full, or stopped being so.
            first: the components of the frontend's first model. None for the first model.
        """
        self.config = config
        self._certificates = certificates
        self._on_change = on_change
        self.kv_events = KvEventFeed()
        get_logger().info("loading the tokenizer", model=config.model.path)
        incarnation = uuid.uuid4().hex

        def engines(outputs: OutputHandler, metrics: FrontendMetrics) -> GrpcEngineClient:
            return GrpcEngineClient(
                config,
                incarnation=incarnation,
                outputs=outputs,
                on_change=self._engines_changed,
                on_moved=metrics.series("penstock:requests_moved").inc,
                on_planned=lambda plan, why: metrics.series("penstock:legs", plan, why).inc(),
                on_gap=metrics.series("penstock:handover_gap_seconds").observe,
                kv_events=self.kv_events,
                certificates=certificates,
                on_lost=lambda cause: metrics.series("penstock:engines_lost", cause).inc(),
            )

        self.assembly = assemble(
            AssemblyConfig(
                model=config.model,
                tokenizer_threads=config.tokenizer_threads,
                limits=config.limits,
                fairness=config.fairness,
                log=config.log,
                lora=config.lora,
                media=config.media,
                disaggregation=config.disaggregation,
                frontend_id=config.name,
            ),
            engines,
            tracer=tracer,
            on_full=on_change,
            first=first,
        )
        self._llm, self._engines, self._metrics = self.assembly.llm, self.assembly.engines, self.assembly.metrics
        self._metrics.add_media(self._engines.media_counts)
        if config.lora.serves:
            self._metrics.add_adapters(self._llm.adapters.adapters.count)
        if config.http.engine_metrics:
            self._metrics.add_engine_loads(self._engines.view.for_metrics)
        self.coordinator = self._coordinator_client(incarnation) if config.coordinator.address else None
        if self.coordinator is not None:
            self._engines.on_first_request = self.coordinator.first_request
            self._llm.adapters.adapters.on_change = self.coordinator.loras_changed
        lora = config.lora
        self._directory = (
            AdapterDirectory(lora.directory, lora.scan_interval, self._llm.adapters.adapters)
            if lora.directory
            else None
        )
        self._directory_task: asyncio.Task[None] | None = None
        self._coordinator_task: asyncio.Task[None] | None = None

    @property
    def name(self) -> str:
        """Name of the model in requests."""
        return self.config.model.name

    @property
    def served(self) -> ServedModel:
        """Components that the protocols need to serve this model."""
        return served_model(self.assembly, self.config.model, self.config.lora)

    @property
    def full(self) -> bool:
        """True if no further request of this model can be admitted."""
        return self._llm.full or self._engines.full

    @property
    def coordinator_connected(self) -> bool:
        """True if the session with the coordinator is open."""
        return self.coordinator is not None and self.coordinator.connected

    @property
    def knows_cluster(self) -> bool:
        """True if the coordinator has sent a view of the cluster."""
        return self.coordinator is not None and self.coordinator.view is not None

    @property
    def tasks(self) -> list[asyncio.Task[None]]:
        """Tasks that the model needs to work."""
        return [task for task in (self._coordinator_task, self._directory_task) if task is not None]

    async def begin(self) -> None:
        """Read the directory of LoRA adapters, and start to watch it."""
        if self._directory is not None:
            await self._directory.begin()
            self._directory_task = asyncio.create_task(self._directory.run(), name="lora directory")

    def follow_engines(self) -> None:
        """Start to connect to engines."""
        if self.coordinator is not None:
            self._coordinator_task = asyncio.create_task(self.coordinator.run(), name="coordinator")
        else:
            self._engines.follow(self.config.engines)

    async def end_requests(self, reason: str) -> None:
        """End all requests. ``reason`` is the reason for their error, or empty."""
        if self._directory_task is not None:
            self._directory_task.cancel()
            await asyncio.gather(self._directory_task, return_exceptions=True)
        self._llm.tenants.flush()
        self._llm.end_all(reason)

    async def close(self) -> None:
        """Close the connections to the coordinator and to engines, and end the processes and threads of this model."""
        if self.assembly.media is not None:
            await self.assembly.media.close()
        if self.coordinator is not None and self._coordinator_task is not None:
            await self.coordinator.close()
            await self._coordinator_task
        await self._engines.close()
        await self.assembly.chat.renderer.close()
        self.assembly.tokenizer.close()

    def _coordinator_client(self, incarnation: str) -> CoordinatorClient:
        coordinator = self.config.coordinator
        return CoordinatorClient(
            coordinator.address,
            frontend_id=self.config.name,
            incarnation=incarnation,
            on_view=self._engines.follow_view,
            on_lost=self._engines.coordinator_lost,
            loras=self._llm.adapters.adapters.registry if self.config.lora.serves else None,
            model=self.name,
            pools=coordinator.pools,
            reconnect_max=coordinator.reconnect_max,
            credentials=ClientCredentials(coordinator.tls, field="coordinator.tls", certificates=self._certificates),
        )

    def _engines_changed(self) -> None:
        engines = self._engines
        for engine in engines.view.connected:
            # create the time series of each engine, so that they have the value 0 before the first request
            self._metrics.engine(engine)
        self._llm.adapters.engines_changed()
        self._metrics.series("penstock:engines_connected").set(len(engines.view.connected))
        self._metrics.series("penstock:requests_held").set(engines.num_held)
        self._metrics.series("penstock:engine_variants").set(len(engines.view.variants()))
        if self.coordinator is not None:
            self.coordinator.demand(engines.num_held)
        self._on_change()
