"""An engine that hangs in a step: its I/O thread reports the engine as wedged to frontends, coordinator and probes."""

import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc
import msgspec
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from penstock.common.v1.sampling_pb2 import SamplingParams
from penstock.common.v1.stats_pb2 import SchedulerStats
from penstock.enginecore.v1 import messages_pb2 as pb
from penstock.enginecore.v1 import service_pb2_grpc
from penstock_common.rpc.server import LIVENESS
from penstock_common.types.cluster import EngineState
from penstock_coordinator.app import Coordinator
from penstock_enginecore.config import CoordinatorClientConfig
from penstock_enginecore.core.scheduler.output import SchedulerOutput
from tests.fakes.engines.engine_harness import make_config
from tests.fakes.engines.engine_server import EngineServer
from tests.fakes.engines.fake_executor import FakeExecutor
from tests.fakes.systems.cluster_members import Frontend, address_of, alive, running

pytestmark = pytest.mark.slow


class HangingExecutor(FakeExecutor):
    """Executor whose steps hang until ``go_on`` is set."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.go_on = threading.Event()

    def execute_model(self, scheduler_output: SchedulerOutput) -> None:
        self.go_on.wait()
        super().execute_model(scheduler_output)


@pytest.fixture
async def coordinator() -> AsyncIterator[Coordinator]:
    async with running() as coordinator:
        yield coordinator


@pytest.fixture
def executor() -> Iterator[HangingExecutor]:
    executor = HangingExecutor(block_size=4)
    yield executor
    executor.go_on.set()


@pytest.fixture
async def address(coordinator: Coordinator, executor: HangingExecutor) -> AsyncIterator[str]:
    config = msgspec.structs.replace(
        make_config(),
        wedged_after=1.0,
        coordinator=CoordinatorClientConfig(address=address_of(coordinator), advertise="engine:1"),
    )
    server = EngineServer(config, executor).start().load()
    yield server.address
    executor.go_on.set()
    server.stop()


class Session:
    """A frontend's session whose messages the test writes and reads."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.call: Any = service_pb2_grpc.EngineCoreServiceStub(channel).Session()

    async def open(self) -> None:
        await self.call.write(pb.SessionRequest(hello=pb.Hello(protocol_revision=1, frontend_id="f")))
        assert (await self.call.read()).HasField("ready")

    async def add(self) -> None:
        params = SamplingParams(seed=0, max_tokens=1)
        request = pb.EngineCoreRequest(request_id="r", prompt_token_ids=[1, 2, 3], sampling_params=params)
        await self.call.write(pb.SessionRequest(add=request))

    async def told(self, *, wedged: bool) -> SchedulerStats:
        """Read until a frame reports this value of ``wedged``."""
        while True:
            frame = (await self.call.read()).outputs
            if frame.HasField("scheduler_stats") and frame.scheduler_stats.wedged == wedged:
                return frame.scheduler_stats


async def test_an_engine_that_hangs_in_a_step_says_so_until_it_steps(
    address: str, executor: HangingExecutor, coordinator: Coordinator
) -> None:
    async with grpc.aio.insecure_channel(address) as channel:
        working, idle, late = Session(channel), Session(channel), Session(channel)
        await working.open()
        await idle.open()
        await working.add()
        assert (await working.told(wedged=True)).seconds_since_last_step >= 1.0
        await idle.told(wedged=True)
        await late.open()
        await late.told(wedged=True)
        info = await service_pb2_grpc.EngineCoreServiceStub(channel).GetEngineInfo(pb.GetEngineInfoRequest())
        assert info.scheduler_stats.wedged
        health: Any = health_pb2_grpc.HealthStub(channel)
        answer = await health.Check(health_pb2.HealthCheckRequest(service=LIVENESS))
        assert answer.status == health_pb2.HealthCheckResponse.NOT_SERVING
        frontend = Frontend(address_of(coordinator))
        async with alive(frontend):
            await frontend.view_where(lambda view: view.engines[0].state is EngineState.WEDGED)
            executor.go_on.set()
            await idle.told(wedged=False)
            await frontend.view_where(lambda view: view.engines[0].state is EngineState.SERVING)
