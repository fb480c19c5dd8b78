"""A data-parallel group over the coordinator's streams: scripted ranks that only exchange the contract's messages."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from penstock.common.v1 import data_parallel_pb2 as common
from penstock.coordinator.v1 import messages_pb2 as pb
from penstock_common.rpc.status import from_rpc_error
from tests.fakes.patience import PATIENCE
from tests.fakes.systems.cluster_members import address_of, connected, running


class Rank:
    """A rank's stream to the coordinator."""

    def __init__(self, stub: Any, name: str, **config: str) -> None:
        self.call = stub.EngineSession()
        self.member = common.GroupMember(engine_id=name, incarnation="1")
        self.register = pb.Register(
            engine_id=name,
            incarnation="1",
            address=f"{name}:1",
            model="m",
            group=pb.GroupRegistration(
                size=2,
                min_size=1,
                max_size=8,
                meeting_address=f"{name}:2",
                parallel_config={"dtype": "float32"} | config,
            ),
        )

    async def join(self) -> "Rank":
        await self.call.write(pb.EngineReport(register=self.register))
        assert (await self.read()).HasField("registered")
        return self

    async def read(self) -> pb.EngineCommand:
        async with asyncio.timeout(PATIENCE):
            command = await self.call.read()
        assert isinstance(command, pb.EngineCommand)
        return command

    async def named(self, *members: str) -> pb.Reconfigure:
        """Read until the coordinator sends the command to form a group of these members. The coordinator repeats
        commands that ranks did not execute.
        """
        while True:
            command = await self.read()
            if [member.engine_id for member in command.reconfigure.group.members] == list(members):
                return command.reconfigure

    async def say(self, **message: Any) -> None:
        await self.call.write(pb.EngineReport(**message))

    async def switched(self, group: common.RankGroup) -> None:
        await self.say(rank_report=common.RankReport(group=group))


@contextlib.asynccontextmanager
async def a_group(**config: Any) -> AsyncIterator[tuple[Any, list[Rank], pb.Reconfigure]]:
    """Yield two ranks that are members of their group."""
    async with running(**config) as coordinator, connected(address_of(coordinator)) as stub:
        ranks = [await Rank(stub, name).join() for name in ("a", "b")]
        for rank in ranks:
            named = await rank.named("a", "b")
        for rank in ranks:
            await rank.switched(named.group)
        yield stub, ranks, named


async def test_a_group_is_named_with_the_places_where_its_ranks_meet() -> None:
    async with a_group() as (_, _, named):
        assert [member.meeting_address for member in named.group.members] == ["a:2", "b:2"]
        assert (named.data_parallel_size, named.rank, named.base_epoch) == (2, 1, 0)


async def test_a_wave_goes_to_the_other_rank_and_a_first_request_to_all() -> None:
    async with a_group() as (stub, (a, b), named):
        epoch = named.group.epoch
        await a.say(start_wave=common.GroupWave(epoch=epoch, wave=4))
        started = (await b.read()).start_dp_wave
        assert (started.group_epoch, started.wave) == (epoch, 4)
        await a.say(wave_complete=common.GroupWave(epoch=epoch, wave=4))
        frontend = stub.FrontendSession()
        await frontend.write(pb.FrontendReport(hello=pb.FrontendHello(frontend_id="f", incarnation="1")))
        while True:
            view = await frontend.read()
            if view.groups and view.groups[0].wave == 5 and not view.groups[0].running:
                break
        assert list(view.groups[0].routed_ranks) == [0, 1]
        first = pb.FirstRequest(rank=a.member, group_epoch=epoch, wave=5)
        await frontend.write(pb.FrontendReport(first_request=first))
        for rank in (a, b):
            assert (await rank.read()).start_dp_wave.wave == 5
        frontend.cancel()


async def test_a_rank_that_would_compute_something_else_is_refused_with_the_keys() -> None:
    async with a_group() as (stub, _, _):
        other = Rank(stub, "c", dtype="bfloat16")
        await other.call.write(pb.EngineReport(register=other.register))
        with pytest.raises(grpc.aio.AioRpcError) as e:
            await other.call.read()
        assert e.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert "dtype is 'bfloat16', not 'float32'" in (e.value.details() or "")


async def test_a_broken_collective_and_stream_are_a_death() -> None:
    async with a_group() as (_, (a, b), named):
        b.call.cancel()
        await a.say(peer_lost=pb.PeerLost(epoch=named.group.epoch))
        alone = await a.named("a")
        assert alone.group.epoch > named.group.epoch
        assert alone.base_epoch == 0


async def test_a_group_grows_by_a_rank_that_comes_and_refuses_another_change_meanwhile() -> None:
    async with a_group() as (stub, ranks, named):
        assert (await stub.Scale(pb.ScaleRequest(replicas=3))).previous_replicas == 2
        for rank in ranks:
            assert (await rank.named("a", "b")).target_size == 3
        ranks.append(await Rank(stub, "c").join())
        for rank in ranks:
            grown = await rank.named("a", "b", "c")
            assert (grown.base_epoch, grown.target_size) == (named.group.epoch, 3)
        with pytest.raises(grpc.aio.AioRpcError) as e:
            await stub.Scale(pb.ScaleRequest(replicas=2))
        assert from_rpc_error(e.value).reason == "RECONFIGURING"
        for rank in ranks:
            await rank.switched(grown.group)
        for size, reason in ((0, "BELOW_MIN_SIZE"), (9, "ABOVE_MAX_SIZE")):
            with pytest.raises(grpc.aio.AioRpcError) as e:
                await stub.Scale(pb.ScaleRequest(replicas=size))
            assert from_rpc_error(e.value).reason == reason


async def test_a_coordinator_that_knows_nothing_is_told_how_many_ranks_there_are_to_be() -> None:
    async with running() as coordinator, connected(address_of(coordinator)) as stub:
        ranks = [Rank(stub, name) for name in ("a", "b", "c")]
        group = common.RankGroup(epoch=7, members=[rank.member for rank in ranks])
        for rank in ranks:
            rank.register.group.report.group.CopyFrom(group)
            rank.register.group.target_size = 5
            await rank.join()
        view = (await stub.GetCluster(pb.GetClusterRequest())).view
        assert [(group.target_size, len(group.group.members)) for group in view.groups] == [(5, 3)]


async def test_messages_of_ranks_are_refused_from_other_members() -> None:
    async with running() as coordinator, connected(address_of(coordinator)) as stub:
        rank = Rank(stub, "a")
        rank.register.ClearField("group")
        await rank.join()
        await rank.say(peer_lost=pb.PeerLost(epoch=1))
        with pytest.raises(grpc.aio.AioRpcError) as e:
            await rank.call.read()
        assert e.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "only ranks of a data-parallel group may send peer_lost" in (e.value.details() or "")
