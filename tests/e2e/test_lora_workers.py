"""A worker is killed during streams with several adapters. Clients get the tokens of an undisturbed run.

``make worker-failures`` kills workers at every point of their lives (``test_worker_streams.py``).
"""

import asyncio
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import DEMO_MODEL
from tests.fakes.patience import PATIENCE
from tests.fakes.systems.cluster import Cluster, read

pytestmark = [pytest.mark.asyncio, pytest.mark.slow]

ADAPTERS = ("pirate", "json")
ANIMALS = ("cow", "fox", "bear", "hen")


def streams(cluster: Cluster) -> list[Any]:
    """Start a stream for each prompt with the base model and with both adapters."""
    wanted = {"max_tokens": 60, "ignore_eos": True, "temperature": 0.0}
    return [
        cluster.generate(f"<|user|>What does a {animal} eat?<|end|><|assistant|>", lora=lora, **wanted)
        for animal in ANIMALS
        for lora in ("", *ADAPTERS)
    ]


def workers_of(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").iterdir()
    children = [int(child) for task in tasks for child in (task / "children").read_text().split()]
    return sorted(
        child for child in children if Path(f"/proc/{child}/cmdline").read_bytes().startswith(b"penstock-worker")
    )


@pytest.mark.parametrize("parts", ["tensor", "pipeline"])
async def test_streams_with_adapters_go_on_when_a_worker_is_killed(parts: str) -> None:
    adapters = json.dumps({name: str(DEMO_MODEL.with_name(f"penstock-tiny-{name}")) for name in ADAPTERS})
    flags: dict[str, Any] = {f"executor__{parts}_parallel_size": 2, "lora__max_loras": 4}
    async with Cluster(DEMO_MODEL, engines=2, frontend_flags={"lora__adapters": adapters}, **flags) as cluster:
        expected = await asyncio.gather(*map(read, streams(cluster)))
        said = [tuple(answer.token_ids) for answer in expected]
        assert all(len(set(said[i : i + 3])) == 3 for i in range(0, len(said), 3)), "adapters say something else"
        calls = streams(cluster)
        firsts = await asyncio.gather(*(call.read() for call in calls))
        engine = cluster.engines[1]
        workers = workers_of(engine.pid)
        assert len(workers) == 2
        assert (await cluster.stats())[1].num_running_reqs > 0
        os.kill(workers[1], signal.SIGKILL)
        answers = await asyncio.gather(*map(read, calls))
        for answer, first, wanted in zip(answers, firsts, expected, strict=True):
            assert [*first.token_ids, *answer.token_ids] == wanted.token_ids
            assert answer.finish_reason == wanted.finish_reason
        async with asyncio.timeout(PATIENCE):
            assert await engine.ended() == 1, engine.log()[-4000:]
