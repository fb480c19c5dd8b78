"""Network failures between ranks. Connections between two processes break or stall while all other peers stay
reachable. With ranks on separate hosts, one host is cut off from all others.

Runs with ``PENSTOCK_GROUP_KILLS`` (make group-kills).
"""

import asyncio
import ipaddress
import re
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.e2e.test_data_parallel import KILLS, PROMPTS, Expected, model
from tests.fakes.engines.rank_cables import NAME, VARIABLE, Cable
from tests.fakes.engines.worker_faults import installed
from tests.fakes.network import hosts
from tests.fakes.network.hosts import Host, Hosts
from tests.fakes.processes import Service
from tests.fakes.systems import rank_trial
from tests.fakes.systems.rank_group import LEASE, RankGroup, held, metric, until
from tests.fakes.systems.rank_trial import Trial

__all__ = ["model"]
pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(not KILLS, reason="PENSTOCK_GROUP_KILLS is not set (make group-kills)"),
]
Cables = dict[Service, Cable]
CUT = 5.0
"""Seconds for which connections carry no data."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cables() -> AsyncIterator[Cables]:
    """Yield the proxies between ranks, by engine."""
    laid: Cables = {}
    yield laid
    for cable in laid.values():
        await cable.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def group(
    cables: Cables, model: tuple[Path, Expected], tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[RankGroup]:
    running = RankGroup(model[0], size=3, plugins=f'["{NAME}"]', expert_parallel__enabled="true", **rank_trial.FLAGS)
    found = installed(tmp_path_factory.mktemp("plugin"), NAME, "tests.fakes.engines.rank_cables")
    for engine in running.engines:
        cables[engine] = cable = Cable()
        await cable.start()
        engine.environment = {**found, VARIABLE: str(cable.port)}
    async with running:
        yield running


@pytest.mark.parametrize("number", [1, 2], ids=["of rank 1 and rank 0", "of rank 2 and all others"])
async def test_connections_that_break_off_cost_a_step_and_no_rank(
    group: RankGroup, cables: Cables, model: tuple[Path, Expected], number: int
) -> None:
    trial = Trial(group, PROMPTS, model[1])
    ranks = await trial.begin()
    epoch = metric(ranks[0], "penstock:group_epoch")
    cables[ranks[number]].cut()
    print(f"\nstreams stood still for {await trial.end():.3f} s")
    await group.whole()
    assert [engine for engine, _ in await group.members()] == ranks
    assert metric(ranks[0], "penstock:group_epoch") > epoch


@pytest.mark.parametrize("number", [1, 2], ids=["of rank 1 and rank 0", "of rank 2 and all others"])
async def test_connections_that_carry_nothing_for_a_while_hold_the_group_up_so_long(
    group: RankGroup, cables: Cables, model: tuple[Path, Expected], number: int
) -> None:
    trial = Trial(group, PROMPTS, model[1])
    ranks = await trial.begin()
    epoch = metric(ranks[0], "penstock:group_epoch")
    unplugged = time.monotonic()
    cables[ranks[number]].unplug()
    await asyncio.sleep(CUT)
    cables[ranks[number]].plug_in()
    seconds = time.monotonic() - unplugged
    print(f"\nstreams stood still for {await trial.end():.3f} s, of which nothing passed in {seconds:.3f} s")
    assert metric(ranks[0], "penstock:group_epoch") == epoch


# The ranks of the tests below run on separate hosts.


@pytest_asyncio.fixture(loop_scope="module")
async def apart(
    model: tuple[Path, Expected], tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[tuple[RankGroup, Hosts]]:
    """Yield three expert-parallel ranks, each on its own host."""
    if reason := hosts.missing():
        pytest.skip(reason)
    secret = tmp_path_factory.mktemp("secret") / "secret"
    secret.touch(mode=0o600)
    secret.write_text("of three ranks, and of nobody else")
    flags = {
        "parallel__secret_file": secret,
        "expert_parallel__enabled": "true",
        "data_parallel__move_after": LEASE,
        "data_parallel__connect_timeout": CUT,
        **rank_trial.FLAGS,
    }
    with Hosts(3) as laid:
        async with RankGroup(model[0], size=3, host=Hosts.own, hosts=laid.hosts, **flags) as running:
            yield running, laid


def connections(engine: Service, host: Host) -> int:
    """Return the number of connections between two hosts in the kernel's tables, also of ended processes."""
    address = int.from_bytes(ipaddress.ip_address(host.address).packed, sys.byteorder)
    tables = "".join(Path(f"/proc/{engine.pid}/net/{name}").read_text() for name in ("tcp", "tcp6"))
    return len(re.findall(rf"[ :][0-9A-F]*{address:08X}:[0-9A-F]{{4}} (?!0A|06)", tables))


def metric_there(engine: Service, host: Host, name: str) -> float:
    """Return a metric of an engine that is cut off, read from inside the engine's host."""
    code = "import sys, urllib.request; print(urllib.request.urlopen(sys.argv[1]).read().decode())"
    address = f"http://127.0.0.1:{engine.metrics_port}/metrics"
    told = subprocess.run(
        [*host.enter, sys.executable, "-c", code, address], check=True, capture_output=True, text=True
    )
    return float(next(line for line in told.stdout.splitlines() if line.startswith(f"{name}{{")).rpartition(" ")[2])


@pytest.mark.parametrize("number", [0, 1])
async def test_a_rank_that_is_cut_off_is_outside_for_all_and_for_itself(
    apart: tuple[RankGroup, Hosts], model: tuple[Path, Expected], number: int
) -> None:
    group, laid = apart
    where = dict(zip(group.engines, laid.hosts, strict=True))
    trial = Trial(group, PROMPTS, model[1])
    ranks = await trial.begin()
    lost, host = ranks[number], where[ranks[number]]
    others = [rank for rank in ranks if rank is not lost]
    epoch = metric(lost, "penstock:group_epoch")
    assert all(connections(rank, host) for rank in others)
    before = {rank: metric(rank, "penstock:group_recovery_seconds_sum") for rank in others}
    threads = {rank: held(rank)[0] for rank in others}
    host.cut_off()
    cut = time.monotonic()
    await until(lambda: bool(metric_there(lost, host, "penstock:group_suspended")))
    print(f"\nrank {number} saw after {time.monotonic() - cut:.2f} s that it is in no group; the lease is {LEASE:g} s")
    assert metric_there(lost, host, "penstock:group_epoch") == epoch
    print(f"the others' streams stood still for {await trial.end([lost]):.2f} s")
    recovered = [metric(rank, "penstock:group_recovery_seconds_sum") - before[rank] for rank in others]
    print(f"from the loss of the group to the next one's first exchange: {', '.join(f'{s:.3f} s' for s in recovered)}")
    await group.whole(2)
    assert {engine for engine, _ in await group.members()} == set(others)
    await until(lambda: not any(connections(rank, host) for rank in others))
    await until(lambda: all(held(rank)[0] <= threads[rank] for rank in others))
    print(f"nothing was left of it {time.monotonic() - cut:.1f} s after the cut")
    await until(lambda: not metric_there(lost, host, "vllm:num_requests_running"))
    host.connect()
    await group.whole(3)
    await trial.begin()
    await trial.end()
    assert laid.questions() == []


async def test_two_ranks_that_lose_each_other_stand_still_until_they_meet_again(
    apart: tuple[RankGroup, Hosts], model: tuple[Path, Expected]
) -> None:
    group, laid = apart
    trial = Trial(group, PROMPTS, model[1])
    ranks = await trial.begin()
    one, other = (laid.hosts[group.engines.index(rank)] for rank in ranks[:2])
    epoch = metric(ranks[2], "penstock:group_epoch")
    one.lose(other)
    other.lose(one)
    since = time.monotonic()
    # The two ranks could not connect in the next epoch, so a second one followed.
    await until(lambda: metric(ranks[2], "penstock:group_epoch") >= epoch + 2)
    one.find(other)
    other.find(one)
    print(f"\nthey lost each other for {time.monotonic() - since:.1f} s")
    assert await trial.streams.end() == 0
    await group.whole(3)
    assert [engine for engine, _ in await group.members()] == ranks
