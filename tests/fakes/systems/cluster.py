"""Coordinator, engines and frontend as processes on this machine, with the state that tests read."""

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import grpc
import msgspec

from penstock.common.v1 import stats_pb2
from penstock.common.v1.sampling_pb2 import SamplingParams
from penstock.enginecore.v1 import messages_pb2 as engine_pb
from penstock.enginecore.v1 import service_pb2_grpc as engine_rpc
from penstock.inference.v1 import messages_pb2 as pb
from penstock.inference.v1 import service_pb2_grpc as rpc
from penstock_common.rpc.channel import make_channel
from tests.fakes.network.hosts import Host
from tests.fakes.patience import PATIENCE
from tests.fakes.processes import KEPT, Service


class Answer(msgspec.Struct):
    """Sum of all messages of a stream."""

    text: str = ""
    token_ids: list[int] = []
    finish_reason: int = 0
    usage: tuple[int, int, int] = (0, 0, 0)
    pieces: int = 0


class Cluster:
    """Cluster of processes: ``async with Cluster(model)``. All services answer when the block begins.

    At the end of the block, the services get SIGTERM. By default, frontends do not wait then until clients have closed
    their connections; ``frontend_flags`` can change that.
    """

    def __init__(
        self,
        model: Path,
        *,
        engines: int = 2,
        spares: int = 0,
        frontends: int = 1,
        lease_seconds: float = 1,
        kv_cache_memory: str = "64MiB",
        host: str = "127.0.0.1",
        hosts: Sequence[Host] = (),
        frontend_flags: Mapping[str, object] | None = None,
        **engine_flags: object,
    ) -> None:
        """Create the cluster. ``spares``: number of engines that get no requests at first. ``hosts``: hosts of the
        engines, if not this machine.
        """
        self.spares = spares
        self.coordinator = Service(
            "penstock_coordinator",
            host=host,
            lease_seconds=lease_seconds,
            restart_grace=lease_seconds,
            metrics_flag="metrics.port",
        )
        self.engines = [
            Service(
                "penstock_enginecore",
                host=hosts[number].address if hosts else host,
                metrics_flag="metrics.port",
                model__path=model,
                engine_id=f"engine-{number}",
                coordinator__address=self.coordinator.address,
                cache__kv_cache_memory=kv_cache_memory,
                executor__num_threads=1,
                **engine_flags,
            )
            for number in range(engines)
        ]
        for engine in self.engines:
            engine.add_flag("coordinator.advertise", engine.address)
        for engine, where in zip(self.engines, hosts, strict=False):
            engine.enter = where.enter
        self.frontends = [
            Service(
                "penstock_frontend",
                host=host,
                metrics_flag="http.port",
                model__path=model,
                frontend_id=f"frontend-{number}",
                coordinator__address=self.coordinator.address,
                http__host=host,
                **({"admin__port": 0} | KEPT | dict(frontend_flags or {})),
            )
            for number in range(frontends)
        ]
        self.frontend = self.frontends[0]

    @property
    def services(self) -> list[Service]:
        """Return all services."""
        return [self.coordinator, *self.engines, *self.frontends]

    async def __aenter__(self) -> Self:
        async with contextlib.AsyncExitStack() as stack:
            for service in self.services:
                await stack.enter_async_context(service)
            await asyncio.gather(*(service.serving() for service in self.services))
            self.channel = await stack.enter_async_context(make_channel(self.frontend.address))
            self.stub = rpc.InferenceServiceStub(self.channel)
            await self.until_engines_are_seen(len(self.engines) - self.spares)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    async def until_engines_are_seen(self, count: int) -> None:
        """Wait until all running frontends route to ``count`` engines. Raises TimeoutError after half a minute."""
        async with asyncio.timeout(PATIENCE):
            for frontend in self.frontends:
                async with make_channel(frontend.address) as channel:
                    stub = rpc.InferenceServiceStub(channel)
                    while frontend.alive and await self._engines_seen(stub) != count:
                        await asyncio.sleep(0.05)

    async def _engines_seen(self, stub: "rpc.InferenceServiceAsyncStub") -> int:
        return (await stub.ListModels(pb.ListModelsRequest())).models[0].num_engines

    async def stats(self) -> list[stats_pb2.SchedulerStats]:
        """Return the load of every engine, queried from the engine itself."""
        found = []
        for engine in self.engines:
            async with make_channel(engine.address) as channel:
                stub = engine_rpc.EngineCoreServiceStub(channel)
                found.append((await stub.GetEngineInfo(engine_pb.GetEngineInfoRequest())).scheduler_stats)
        return found

    async def until_idle(self) -> None:
        """Wait until no engine has a request. Raises TimeoutError after half a minute."""
        async with asyncio.timeout(PATIENCE):
            while any(s.num_running_reqs or s.num_waiting_reqs for s in await self.stats()):
                await asyncio.sleep(0.05)

    def generate(
        self, prompt: str, *, lora: str = "", **sampling: Any
    ) -> "grpc.aio.UnaryStreamCall[pb.GenerateRequest, pb.GenerateResponse]":
        """Start a stream and return its call. ``lora``: name of an adapter, or empty."""
        params = SamplingParams(**sampling)
        return self.stub.Generate(pb.GenerateRequest(text=prompt, lora=lora, sampling_params=params))


async def read(call: "grpc.aio.UnaryStreamCall[pb.GenerateRequest, pb.GenerateResponse]") -> Answer:
    """Read the remaining messages of a delta stream."""
    answer = Answer()
    while isinstance(response := await call.read(), pb.GenerateResponse):
        answer.text += response.text
        answer.token_ids = [*answer.token_ids, *response.token_ids]
        answer.finish_reason = response.finish_reason or answer.finish_reason
        answer.pieces += 1
        if response.HasField("usage"):
            usage = response.usage
            answer.usage = (usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens)
    return answer
