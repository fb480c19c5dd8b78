"""Recorded events of a real group's ranks and coordinators, replayed through the state machines of the model check."""

import asyncio
from pathlib import Path

import pytest

from penstock.admin.v1 import messages_pb2 as admin_pb
from penstock.common.v1 import control_pb2
from penstock.inference.v1 import messages_pb2 as pb
from tests.e2e.test_data_parallel import COUNT, PROMPTS, Expected, generate, model
from tests.fakes.systems.cluster import read
from tests.fakes.systems.rank_group import RankGroup, until
from tests.modelcheck.replay import at_rest, replay
from tests.modelcheck.trace import SUFFIX
from tests.modelcheck.trace import read as read_trace

__all__ = ["model"]
pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]
LEASE = 10.0
"""Lease in seconds. It is long enough that no live rank loses its lease on a busy machine."""
ALL = range(len(PROMPTS))


class Recorded(RankGroup):
    """A group with a spare rank. Ranks and coordinator write their traces into a folder."""

    def __init__(self, model: Path, folder: Path, size: int) -> None:
        super().__init__(model, size=size, spares=1, lease_seconds=LEASE, expert_parallel__enabled="true")
        self.folder = folder
        self.num_rests = 0
        for service in (self.coordinator, *self.engines):
            service.run_by("tests.modelcheck.recorded", folder)

    async def rest(self) -> None:
        """Wait until no events are pending: all requests have ended, or a pause holds them."""
        await until(self._is_at_rest)
        self.num_rests += 1

    def _is_at_rest(self) -> bool:
        pids = [service.pid for service in (self.coordinator, *self.engines)]
        traces = [path for path in self.folder.glob(f"*{SUFFIX}") if any(f"-{pid}-" in path.name for pid in pids)]
        begun = [path for path in traces if path.stat().st_size]
        return len(begun) == len(pids) and at_rest([read_trace(path) for path in begun])


async def waves(group: Recorded, expected: Expected) -> None:
    """Run requests on one rank only, then on any rank."""
    for on in ((await group.members())[0][1], None):
        answers = await asyncio.gather(*(read(generate(group, i, on)) for i in ALL))
        assert [answer.token_ids for answer in answers] == expected
        await group.until_idle()
    await group.rest()


async def pause_and_resume(group: Recorded, expected: Expected, mode: int) -> None:
    running = generate(group, 0)
    assert await running.read()
    await group.admin.Pause(admin_pb.PauseRequest(mode=mode))
    held = asyncio.ensure_future(read(generate(group, 1)))
    await group.rest()
    await group.admin.Resume(admin_pb.ResumeRequest())
    assert (await held).token_ids == expected[1]
    await read(running)


async def lose_a_rank(group: Recorded, expected: Expected) -> None:
    """Kill a rank: its requests resume on another rank, and the spare replaces it.

    The restarted rank is the new spare.
    """
    (_, first), (victim, last) = (await group.members())[:2]
    streams = [generate(group, i, (first, last)[i % 2]) for i in ALL]
    begun = [await stream.read() for stream in streams]
    await victim.kill()
    for piece, answer, wanted in zip(begun, await asyncio.gather(*map(read, streams)), expected, strict=True):
        assert isinstance(piece, pb.GenerateResponse)
        assert [*piece.token_ids, *answer.token_ids] == wanted
    await group.whole()
    await victim.restart()
    await waves(group, expected)


async def lose_the_coordinator(group: Recorded, expected: Expected) -> None:
    await group.coordinator.kill()
    assert (await read(generate(group, 0))).token_ids == expected[0]
    await group.coordinator.restart()
    await group.whole()
    await waves(group, expected)


@pytest.mark.parametrize("size", [2, 3])
async def test_processes_do_what_the_model_check_explores(
    model: tuple[Path, Expected], tmp_path: Path, size: int
) -> None:
    expected = model[1]
    async with Recorded(model[0], tmp_path, size) as group:
        await waves(group, expected)
        for mode in (control_pb2.PAUSE_MODE_KEEP, control_pb2.PAUSE_MODE_WAIT):
            await pause_and_resume(group, expected, mode)
        await lose_a_rank(group, expected)
        await lose_the_coordinator(group, expected)
        for wanted in (size + 1, size):
            await group.ask_for(wanted)
            await group.whole(wanted)
            await waves(group, expected)
    replayed = replay(tmp_path)
    print(replayed)
    assert replayed.machines == size + 1 + len(["started again"]) + len(["coordinator", "the next"])
    assert replayed.epochs >= len(["first", "without the dead one", "with the spare", "larger", "smaller"])
    assert replayed.steps >= COUNT
    assert replayed.rests >= group.num_rests
