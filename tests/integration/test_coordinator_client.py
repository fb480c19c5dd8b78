"""The engine's coordinator client against a coordinator that misbehaves or is not served yet."""

import asyncio
import contextlib

import pytest

from penstock.coordinator.v1 import messages_pb2 as pb
from penstock.coordinator.v1 import service_pb2_grpc
from penstock_common.config.sections import ServerConfig
from penstock_common.rpc.server import RpcServer
from penstock_common.types.cluster import DrainCommand
from penstock_common.types.outputs import SchedulerStats
from penstock_coordinator.app import SERVICE_NAME
from tests.fakes.systems.cluster_members import (
    LONG_LEASE,
    Engine,
    Frontend,
    address_of,
    alive,
    eventually,
    running,
)


class ScriptedCoordinator(service_pb2_grpc.CoordinatorServiceServicer):
    """Accepts an engine and then says what the test wants."""

    def __init__(self, *answers):
        self.answers = answers
        self.num_sessions = 0

    async def EngineSession(self, request_iterator, context):
        self.num_sessions += 1
        await anext(aiter(request_iterator))
        for answer in self.answers:
            yield answer
        await asyncio.Event().wait()


@contextlib.asynccontextmanager
async def scripted(*answers):
    rpc = RpcServer(ServerConfig(host="127.0.0.1", port=0), service_names=[SERVICE_NAME])
    servicer = ScriptedCoordinator(*answers)
    service_pb2_grpc.add_CoordinatorServiceServicer_to_server(servicer, rpc.server)
    port = await rpc.start()
    try:
        yield servicer, f"127.0.0.1:{port}"
    finally:
        await rpc.stop(0)


REGISTERED = pb.EngineCommand(registered=pb.Registered(lease_seconds=LONG_LEASE))


async def test_a_drain_command_reaches_the_engine():
    async with scripted(REGISTERED, pb.EngineCommand(drain=pb.Drain(timeout_seconds=12.5))) as (_, address):
        engine = Engine(address)
        async with alive(engine):
            await eventually(lambda: engine.commands == [DrainCommand(12.5)])


@pytest.mark.parametrize(
    "answers",
    [
        [REGISTERED, pb.EngineCommand(start_dp_wave=pb.StartDpWave(wave=1))],
        [REGISTERED, pb.EngineCommand(reconfigure=pb.Reconfigure())],
        [pb.EngineCommand(drain=pb.Drain())],
        [pb.EngineCommand(registered=pb.Registered())],
    ],
)
async def test_an_engine_ends_a_session_that_asks_for_what_it_does_not_serve_and_tries_again(answers):
    async with scripted(*answers) as (coordinator, address), alive(Engine(address)) as (engine,):
        await eventually(lambda: coordinator.num_sessions >= 3)
        assert engine.commands == []


async def test_an_engine_can_close_while_the_coordinator_does_not_answer():
    async with scripted() as (coordinator, address), alive(Engine(address)):
        await eventually(lambda: coordinator.num_sessions == 1)


async def test_a_defect_in_the_engine_s_statistics_does_not_end_the_client():
    async with running() as coordinator:
        engine, frontend = Engine(address_of(coordinator)), Frontend(address_of(coordinator))
        engine.load = "not statistics"
        async with alive(engine, frontend):
            await frontend.engines("engine-0")
            engine.load = SchedulerStats(num_running_reqs=1)
            await frontend.view_where(lambda v: v.engines[0].num_running_reqs == 1)
