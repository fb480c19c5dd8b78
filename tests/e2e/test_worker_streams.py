"""Workers of one of two engines are killed or stopped during 64 streams.

Clients get the tokens of an undisturbed run. All tests here belong to ``make worker-failures``, because an engine with
two workers takes long to start.
"""

import asyncio
import itertools
import json
import os
import signal
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests.e2e.conftest import DEMO_MODEL
from tests.fakes.engines.worker_faults import NAME, POINTS, VARIABLE, Fault, fired, installed
from tests.fakes.patience import PATIENCE
from tests.fakes.processes import Service
from tests.fakes.systems.cluster import Answer, Cluster, read

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(os.environ.get("PENSTOCK_WORKER_FAILURES") != "full", reason="make worker-failures runs it"),
]
STEP_TIMEOUT = 5.0
STREAMS = 64
FAULTS = [Fault(rank, point, does) for point, rank, does in itertools.product(POINTS, (0, 1), ("kill", "stop"))]
TOKENS = 100
ADAPTERS = ("pirate", "json")


class Workers:
    """Two engines with two workers each. Faults hit the second engine."""

    def __init__(self, cluster: Cluster, armed_at: Path, expected: list[Answer]) -> None:
        self.cluster, self.armed_at, self.expected = cluster, armed_at, expected

    @property
    def engine(self) -> Service:
        return self.cluster.engines[1]

    def begin(self) -> list[Any]:
        """Start all streams."""
        return streams(self.cluster, ADAPTERS)

    def pids(self) -> list[int]:
        """Return the workers' pids by rank."""
        found = []
        for task in Path(f"/proc/{self.engine.pid}/task").iterdir():
            for pid in map(int, (task / "children").read_text().split()):
                if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"penstock-worker"):
                    found.append(pid)
        assert len(found) == 2, found
        return sorted(found)  # pids ascend in order of rank, because workers start in that order

    async def strike(self, fault: Fault) -> None:
        """Arm the fault. Faults of idle workers happen immediately; other faults happen at their point."""
        if fault.point == "idle":
            os.kill(self.pids()[fault.rank], signal.SIGKILL if fault.does == "kill" else signal.SIGSTOP)
            return
        if fault.point in ("draining", "ending"):
            self.engine.send_signal(signal.SIGTERM)
        fault.arm(self.armed_at)

    async def again(self) -> None:
        """Restart the engine and wait until it serves."""
        await self.engine.start()
        await self.engine.serving()
        await self.cluster.until_engines_are_seen(2)


def streams(cluster: Cluster, adapters: Sequence[str] = ()) -> list[Any]:
    """Return greedy and seeded streams with different prompts, for the base model and ``adapters`` in turn."""
    names = ("", *adapters)
    return [
        cluster.generate(
            f"Once there were {number} foxes who",
            lora=names[number % len(names)],
            max_tokens=TOKENS,
            ignore_eos=True,
            **({"temperature": 0.0} if number % 2 else {"temperature": 0.9, "seed": number}),
        )
        for number in range(STREAMS)
    ]


def running(pids: Sequence[int]) -> list[int]:
    return [pid for pid in pids if Path(f"/proc/{pid}").exists()]


async def read_all(calls: Sequence[Any]) -> list[Answer]:
    return await asyncio.gather(*map(read, calls))


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def workers(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Workers]:
    directory = tmp_path_factory.mktemp("workers")
    flags: dict[str, Any] = {
        "executor__kind": "multiproc",
        "executor__tensor_parallel_size": 2,
        "executor__step_timeout": STEP_TIMEOUT,
        "scheduler__async_scheduling": "true",
        "plugins": f'["{NAME}"]',
        "lora__max_loras": 4,
    }
    adapters = json.dumps({name: str(DEMO_MODEL.with_name(f"penstock-tiny-{name}")) for name in ADAPTERS})
    cluster = Cluster(DEMO_MODEL, engines=2, frontend_flags={"lora__adapters": adapters}, **flags)
    for engine in cluster.engines:
        engine.environment = dict(installed(directory / str(engine.port)))
    cluster.engines[1].environment[VARIABLE] = str(directory / "fault")
    async with cluster:
        yield Workers(cluster, directory / "fault", await read_all(streams(cluster, ADAPTERS)))


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f"{f.point.replace(' ', '-')}-{f.rank}-{f.does}")
async def test_every_stream_is_what_it_would_have_been(workers: Workers, fault: Fault) -> None:
    engine, cluster = workers.engine, workers.cluster
    workers.armed_at.with_suffix(".done").unlink(missing_ok=True)
    if fault.point in ("loading", "loaded"):
        await engine.stop()
        fault.arm(workers.armed_at)
        await engine.start()
        calls, gone = workers.begin(), []
    elif fault.point == "idle":
        gone = workers.pids()
        await workers.strike(fault)
        calls = workers.begin()
    else:
        calls, gone = workers.begin(), workers.pids()
        firsts = await asyncio.gather(*(call.read() for call in calls))
        await workers.strike(fault)
    answers = await read_all(calls)
    if fault.point not in ("loading", "loaded", "idle"):
        for answer, first in zip(answers, firsts, strict=True):
            answer.text, answer.token_ids = first.text + answer.text, [*first.token_ids, *answer.token_ids]
    assert [(a.text, a.token_ids, a.finish_reason) for a in answers] == [
        (a.text, a.token_ids, a.finish_reason) for a in workers.expected
    ]
    async with asyncio.timeout(PATIENCE):
        code = await engine.ended()
    assert code == (0 if fault.point == "ending" else 1), engine.log()[-4000:]
    assert fault.point == "idle" or fired(workers.armed_at) is not None
    assert not running(gone)
    await workers.again()
    assert (await cluster.stats())[1].num_running_reqs == 0
