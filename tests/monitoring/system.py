"""A small release as processes on this machine: coordinator, engines with faults, and frontend.

A Prometheus scrapes the processes.
"""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import msgspec

from tests.fakes.engines.faulty_engine import ADAPTER, Faults
from tests.fakes.network.certificates import Authority, Files
from tests.fakes.network.kubernetes_api import Server
from tests.fakes.patience import PATIENCE
from tests.fakes.processes import Service
from tests.monitoring import queries
from tests.monitoring.prometheus import Prometheus, hurried

ENGINES = 2
DRAFTS = 1
"""Number of the engine with speculative decoding."""
LORA = "pirate"
"""Name of the adapter."""
SLOTS = 4
"""Maximum number of concurrent requests of an engine."""
WAIT = 3
"""Maximum seconds that a request waits for an engine."""
LIMIT = 40
"""Maximum number of concurrent requests of the frontend."""
THRESHOLDS = {"firstTokenSeconds": 5, "interTokenSeconds": 1.5, "kvCacheUsage": 0.6}
"""Thresholds, in seconds or as a share, above the values of a busy machine without faults.

A preempted request leaves a quarter of these small caches in use.
"""
RENEWED = 90
"""Validity in days of a certificate that causes no alert."""


class Engine(Service):
    """A process with a real engine over a fake executor."""

    def __init__(self, number: int, model: Path, coordinator: str, faults: Path) -> None:
        super().__init__(
            "tests.fakes.engines.faulty_engine",
            metrics_flag="metrics.port",
            model__path=model,
            model__served_model_name="demo",
            engine_id=f"engine-{number}",
            coordinator__address=coordinator,
            metrics__host="127.0.0.1",
            scheduler__max_num_seqs=SLOTS,
            wedged_after=2,
            lora__max_loras=1,
            speculative__method="ngram" if number == DRAFTS else "",
        )
        self.add_flag("coordinator.advertise", self.address)
        self._faults = faults / f"{number}.json"
        self.environment["FAULTY_ENGINE"] = str(self._faults)
        self.set()

    def set(self, **faults: Any) -> None:
        """Replace the engine's faults. The change applies from the next step."""
        fresh = self._faults.with_suffix(".new")
        fresh.write_bytes(msgspec.json.encode(Faults(**faults)))
        fresh.replace(self._faults)


class System:
    """The release: ``async with System(model, folder)``. All services serve and are scraped when the block begins."""

    def __init__(self, model: Path, folder: Path) -> None:
        self.api_server = Server()
        self.coordinator = Service(
            "tests.fakes.systems.kubernetes_coordinator",
            lease_seconds=1,
            restart_grace=1,
            metrics_flag="metrics.port",
            kubernetes__deletion_costs="true",
        )
        self.engines = [Engine(number, model, self.coordinator.address, folder) for number in range(ENGINES)]
        self._authority = Authority(days=RENEWED)
        self._certificates = folder / "certificates"
        certificate = self.issue(days=RENEWED)
        self.frontend = Service(
            "penstock_frontend",
            metrics_flag="http.port",
            model__path=model,
            model__served_model_name="demo",
            frontend_id="frontend-0",
            coordinator__address=self.coordinator.address,
            admin__port=0,
            admin__tls__certificate=certificate.certificate,
            admin__tls__key=certificate.key,
            http__host="127.0.0.1",
            http__engine_metrics="false",
            engine_wait_timeout=WAIT,
            limits__max_requests=LIMIT,
            lora__adapters=json.dumps({LORA: ADAPTER}),
        )
        rules = hurried(queries.rules(**THRESHOLDS))
        self.prometheus = Prometheus(dict(self._targets()), rules)

    def issue(self, *, days: int) -> Files:
        """Replace the certificate of the frontend's operators' port by one that is valid for ``days`` days."""
        return self._authority.issue("penstock-frontend", days=days).write(self._certificates)

    @property
    def services(self) -> list[Service]:
        return [self.coordinator, *self.engines, self.frontend]

    def _targets(self) -> list[tuple[str, dict[str, str]]]:
        """Return the addresses of ``/metrics``, with the labels that the chart's PodMonitors add."""
        of_release = {"namespace": queries.NAMESPACE, "release": queries.RELEASE}
        labelled = [
            (self.coordinator, {"pod": "coordinator-0", "component": "coordinator"}),
            (self.frontend, {"pod": "frontend-0", "component": "frontend"}),
        ]
        labelled += [
            (engine, {"pod": f"engine-{number}", "component": "enginecore", "pool": "default"})
            for number, engine in enumerate(self.engines)
        ]
        return [(f"127.0.0.1:{service.metrics_port}", of_release | labels) for service, labels in labelled]

    async def __aenter__(self) -> "System":
        async with contextlib.AsyncExitStack() as stack:
            await stack.enter_async_context(self.api_server)
            self.coordinator.environment["API_SERVER"] = self.api_server.url
            for service in self.services:
                await stack.enter_async_context(service)
            await asyncio.gather(*(service.serving() for service in self.services))
            self._client = await stack.enter_async_context(
                httpx.AsyncClient(base_url=f"http://127.0.0.1:{self.frontend.metrics_port}", timeout=PATIENCE)
            )
            await stack.enter_async_context(self.prometheus)
            self._stack = stack.pop_all()
        await self.until_whole()
        await self.prometheus.until_quiet()  # Prometheus evaluates rules for some seconds before the first scrape
        return self

    async def __aexit__(self, *error: Any) -> None:
        for engine in self.engines:
            engine.set()
        await self._stack.__aexit__(*error)

    async def until_whole(self) -> None:
        """Wait until every service runs and is scraped, and all engines serve."""
        whole = f'sum(up) == {len(self.services)} and on () sum(penstock_coordinator_engines{{state="serving"}}) == {ENGINES}'
        async with asyncio.timeout(PATIENCE):
            while not await self.prometheus.query(whole):
                await asyncio.sleep(0.2)

    async def ask(self, max_tokens: int = 8, prompt: str = "hello", model: str = "demo") -> int:
        """Send one request and return its HTTP status. ``model`` is the model or an adapter of it."""
        body = {"model": model, "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True}
        answer = await self._client.post("/v1/completions", content=json.dumps(body))
        return answer.status_code

    @contextlib.asynccontextmanager
    async def asked(self, clients: int, **request: Any) -> AsyncIterator[None]:
        """Keep ``clients`` clients running inside the block. Each sends its next request after any answer."""

        async def client() -> None:
            while True:
                with contextlib.suppress(httpx.TransportError):  # some tests kill the frontend
                    await self.ask(**request)
                await asyncio.sleep(0.05)

        tasks = [asyncio.create_task(client()) for _ in range(clients)]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def again(self, *services: Service) -> None:
        """Restart ended services, and wait until the system is complete again."""
        for service in services:
            if not service.alive:
                await service.start()
        await asyncio.gather(*(service.serving() for service in services))
        await self.until_whole()
