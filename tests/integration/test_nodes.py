"""Engines over several nodes. A node is a group of processes with its own loopback address.

With ``PENSTOCK_WORKER_FAILURES=full`` (``make worker-failures``) all tests run, otherwise only the quick ones.
"""

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest

from penstock_common.config.sections import ServerConfig
from penstock_common.types.sampling import SamplingParams
from penstock_enginecore.config import EngineCoreConfig, ExecutorConfig, ModelConfig, NodesConfig
from penstock_enginecore.core.scheduler.output import SchedulerOutput
from penstock_enginecore.executor.multiproc.executor import MultiprocExecutor
from penstock_enginecore.worker.failures import WorkersGone
from tests.fakes.engines.in_process import build_engine, config_of
from tests.fakes.engines.node_process import NodeProcess, node_process
from tests.fakes.engines.worker_process import MODULE, Misdeed
from tests.fakes.models.tiny_models import save_tiny_model
from tests.fakes.network.ports import free_port
from tests.fakes.patience import PATIENCE
from tests.integration import test_lora_parallel as lora
from tests.integration.test_stages import GREEDY, NEW_TOKENS, SECTIONS, expected, prompts, run

pytestmark = pytest.mark.slow

full = pytest.mark.skipif(os.environ.get("PENSTOCK_WORKER_FAILURES") != "full", reason="make worker-failures runs it")
SEEDED = [SamplingParams(temperature=0.8, seed=i, top_p=0.9, max_tokens=NEW_TOKENS) for i in range(len(prompts()))]
QUIET = Misdeed()
HERE, THERE = "127.0.0.1", "127.0.0.2"


class Nodes(NamedTuple):
    executor: MultiprocExecutor
    node: NodeProcess


def at_node(config: EngineCoreConfig, index: int = 1) -> EngineCoreConfig:
    """Return the configuration of another node."""
    nodes = config.executor.nodes
    theirs = msgspec.structs.replace(nodes, index=index, leader=HERE, address=THERE)
    return msgspec.structs.replace(config, executor=msgspec.structs.replace(config.executor, nodes=theirs))


@contextlib.contextmanager
def nodes_of(tmp_path: Path, misdeed: Misdeed = QUIET, *, step_timeout: float = PATIENCE) -> Iterator[Nodes]:
    """Yield two nodes. Each node has one worker without a model."""
    config = EngineCoreConfig(
        model=ModelConfig(path=misdeed.path),
        executor=ExecutorConfig(
            pipeline_parallel_size=2,
            step_timeout=step_timeout,
            nodes=NodesConfig(size=2, port=free_port(), address=HERE, timeout=PATIENCE),
        ),
        server=ServerConfig(host=HERE),
    )
    executor = MultiprocExecutor(config, module=MODULE)
    with node_process(at_node(config), tmp_path, MODULE) as node:
        try:
            executor.load_model(lambda _: None)
            yield Nodes(executor, node)
        finally:
            executor.shutdown()
            assert not any(Path(f"/proc/{pid}").exists() for pid in executor.pids)


def sampled(executor: MultiprocExecutor, number: int) -> Any:
    executor.execute_model(
        SchedulerOutput(step=number, num_scheduled_tokens={"a": 1, "b": 1}, total_num_scheduled_tokens=2)
    )
    return executor.sample_tokens()


def until_gone(pids: list[int]) -> None:
    deadline = time.monotonic() + PATIENCE
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < deadline, pids
        time.sleep(0.01)


def test_workers_of_all_nodes_do_what_they_are_told_and_end_with_the_engine(tmp_path: Path) -> None:
    with nodes_of(tmp_path) as (executor, node):
        # The memory of the last worker, which has the least memory.
        assert executor.available_kv_cache_memory() == 2**20 * 7
        assert executor.collective_rpc("anything", [1]) == [[0, "anything", [1]], [1, "anything", [1]]]
        node.terminate()  # ignored, because only the engine ends its workers
        workers = node.workers()
        for number in range(1, 50):
            assert sampled(executor, number).result(PATIENCE).sampled_token_ids == [[number], [number]]
        executor.shutdown()
        assert node.ended() == 0, node.log()
        until_gone(workers)


@pytest.mark.parametrize(
    ("rank", "told"),
    [
        (1, r"node 1: worker 1 \(pid \d+\) was killed by SIGKILL"),
        pytest.param(0, r"worker 0 \(pid \d+\) was killed by SIGKILL", marks=full),
    ],
)
def test_the_end_of_a_worker_ends_all_of_them(tmp_path: Path, rank: int, told: str) -> None:
    with nodes_of(tmp_path, Misdeed(rank, "sample", "kill")) as (executor, node):
        failures: list[Exception] = []
        executor.watch(failures.append)
        workers = node.workers()
        with pytest.raises(WorkersGone, match=told):
            sampled(executor, 1).result(PATIENCE)
        assert node.ended() == 1
        assert failures
        until_gone([*workers, *executor.pids])
        assert f"worker {rank} (pid " in node.log()


def test_the_end_of_a_node_ends_all_workers(tmp_path: Path) -> None:
    with nodes_of(tmp_path, Misdeed(1, "sample", "hang")) as (executor, node):
        workers = node.workers()
        step = sampled(executor, 1)
        node.kill()
        with pytest.raises(WorkersGone, match="node 1: the connection to this node broke"):
            step.result(PATIENCE)
        until_gone([*workers, *executor.pids])


@full
def test_a_node_that_is_stopped_is_given_up(tmp_path: Path) -> None:
    with nodes_of(tmp_path) as (executor, node):
        os.kill(node.popen.pid, signal.SIGSTOP)
        with pytest.raises(WorkersGone, match="node 1: the connection to this node broke"):
            executor.collective_rpc("anything", [])


@full
def test_a_step_that_hangs_on_another_node_is_told_with_all_stacks(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with nodes_of(tmp_path, Misdeed(1, "sample", "hang"), step_timeout=2.0) as (executor, node):
        with pytest.raises(WorkersGone, match=r"a step did not end within executor.step_timeout \(2 s\)"):
            sampled(executor, 1).result(PATIENCE)
        assert node.ended() == 1
    here, there = sorted(record.message for record in caplog.records if "stack traces" in record.message)
    assert here.startswith("stack traces of worker 0")
    assert there.startswith("stack traces of worker 1")
    assert "in in_a_collective" in there


@full
def test_a_worker_that_is_stopped_on_another_node_is_found(tmp_path: Path) -> None:
    with nodes_of(tmp_path, step_timeout=2.0) as (executor, node):
        os.kill(node.workers()[0], signal.SIGSTOP)
        with pytest.raises(
            WorkersGone, match="worker 1 .* was stopped by a signal for longer than executor.step_timeout"
        ):
            executor.collective_rpc("anything", [])


def test_a_node_that_does_not_come_is_waited_for_as_long_as_it_was_said() -> None:
    config = EngineCoreConfig(
        model=ModelConfig(path=QUIET.path),
        executor=ExecutorConfig(pipeline_parallel_size=3, nodes=NodesConfig(size=3, port=0, address=HERE, timeout=1.0)),
        server=ServerConfig(host=HERE),
    )
    executor = MultiprocExecutor(config, module=MODULE)
    lines: list[str] = []
    with pytest.raises(WorkersGone, match=r"nodes 1, 2 of 3 did not attach to port \d+ within 1 s"):
        executor.load_model(lines.append)
    assert lines == ["waiting for nodes 1, 2 to attach; executor.nodes.size is 3"]
    executor.shutdown()
    until_gone(executor.pids)


@pytest.mark.parametrize("tensor", [1, pytest.param(2, marks=full)])
def test_tokens_are_those_of_transformers_and_seeded_ones_those_of_one_worker(tensor: int, tmp_path: Path) -> None:
    model = save_tiny_model("llama", tmp_path, num_hidden_layers=4)
    one = build_engine(tmp_path, **SECTIONS)
    seeded = run(one, "s", SEEDED)
    one.shutdown()
    nodes = NodesConfig(size=2, port=free_port(), address=HERE, timeout=PATIENCE)
    executor = {"tensor_parallel_size": tensor, "pipeline_parallel_size": 2, "nodes": nodes}
    config = config_of(tmp_path, executor=executor, **SECTIONS)
    with node_process(at_node(config), tmp_path) as node:
        engine = build_engine(tmp_path, executor=executor, **SECTIONS)
        try:
            assert run(engine, "first", GREEDY) == expected(model)
            assert run(engine, "again", GREEDY) == expected(model)
            assert run(engine, "s", SEEDED) == seeded
        finally:
            engine.shutdown()
        assert node.ended() == 0, node.log()


def test_adapters_are_read_on_each_node(tmp_path: Path) -> None:
    saved = lora.save("qwen3", tmp_path, hidden_size=64, vocab_size=lora.VOCAB_SIZE)
    one = build_engine(saved.path, **lora.SECTIONS)
    expected = lora.run(one, saved.requests())
    one.shutdown()
    nodes = NodesConfig(size=2, port=free_port(), address=HERE, timeout=PATIENCE)
    executor = {"tensor_parallel_size": 1, "pipeline_parallel_size": 2, "nodes": nodes}
    config = config_of(saved.path, executor=executor, **lora.SECTIONS)
    with node_process(at_node(config), tmp_path) as node:
        engine = build_engine(saved.path, executor=executor, **lora.SECTIONS)
        try:
            found = lora.run(engine, saved.requests())
        finally:
            engine.shutdown()
        assert node.ended() == 0, node.log()
    assert {name: each.numbers for name, each in found.items()} == {
        name: each.numbers for name, each in expected.items()
    }
