"""The cores that a worker runs on, on machines that do not exist."""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from penstock_enginecore.executor import device as numa
from penstock_enginecore.executor.device import Home, find_home, nodes_near, read_nodes, settle

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
TWO = {0: frozenset({0, 1, 2, 3}), 1: frozenset({4, 5, 6, 7})}
ALL = set(range(8))


@pytest.fixture
def sys(tmp_path: Path) -> Path:
    """Return a sysfs with two nodes, a third that has only memory, and three GPUs: on node 1, on node 0, and unknown."""
    for node, cores in ((0, "0-1,4-5"), (1, "2-3,6-7"), (2, "")):
        directory = tmp_path / "devices/system/node" / f"node{node}"
        directory.mkdir(parents=True)
        (directory / "cpulist").write_text(f"{cores}\n")
    for address, node in (("0000:1b:00.0", 1), ("0001:43:00.0", 0), ("0000:9f:00.0", -1)):
        device = tmp_path / "bus/pci/devices" / address
        device.mkdir(parents=True)
        (device / "numa_node").write_text(f"{node}\n")
    return tmp_path


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that the GPUs of ``sys`` exist, and one that it does not list."""
    places = [(0, 0x1B), (1, 0x43), (0, 0x9F), (0, 0xDD)]
    found = [SimpleNamespace(pci_domain_id=domain, pci_bus_id=bus, pci_device_id=0) for domain, bus in places]
    monkeypatch.setattr(torch.cuda, "get_device_properties", found.__getitem__)


def test_nodes_and_their_cores_are_read(sys: Path) -> None:
    assert read_nodes(sys) == {0: {0, 1, 4, 5}, 1: {2, 3, 6, 7}}


def test_a_system_that_tells_nothing_has_no_nodes(tmp_path: Path) -> None:
    assert read_nodes(tmp_path) == {}
    assert nodes_near(CPU, 2, sys=tmp_path) == [None, None]


@pytest.mark.usefixtures("gpus")
def test_a_worker_is_near_its_gpu(sys: Path) -> None:
    assert nodes_near(CUDA, 4, sys=sys) == [1, 0, None, None]
    assert nodes_near(CUDA, 2, (1, 0), sys) == [0, 1]


def test_workers_on_cores_are_dealt_over_the_nodes(sys: Path) -> None:
    assert nodes_near(CPU, 4, sys=sys) == [0, 0, 1, 1]
    assert nodes_near(CPU, 2, sys=sys) == [0, 1]
    assert nodes_near(CPU, 1, sys=sys) == [None], "one alone may use all of them"


def test_a_worker_runs_on_the_cores_of_its_node() -> None:
    assert find_home(0, [1, 1, 0], TWO, ALL) == Home(1, TWO[1], 2)
    assert find_home(2, [1, 1, 0], TWO, ALL) == Home(0, TWO[0], 1)


def test_no_core_is_used_that_the_process_may_not() -> None:
    assert find_home(0, [1], TWO, {2, 3, 4}) == Home(1, frozenset({4}), 1)


@pytest.mark.parametrize(
    ("near", "nodes", "allowed"),
    [
        pytest.param([None], TWO, ALL, id="unknown"),
        pytest.param([0], {0: frozenset(ALL)}, ALL, id="one node"),
        pytest.param([1], TWO, {4, 5}, id="kept to its node"),
        pytest.param([1], TWO, {0, 1}, id="kept to another node"),
        pytest.param([2], TWO, ALL, id="a node without cores"),
    ],
)
def test_a_worker_is_left_where_it_is(
    near: list[int | None], nodes: dict[int, frozenset[int]], allowed: set[int]
) -> None:
    assert find_home(0, near, nodes, allowed) is None


class TestSettle:
    @pytest.fixture
    def two_nodes(self, monkeypatch: pytest.MonkeyPatch) -> dict[int, frozenset[int]]:
        """Return the cores that this process may use, divided between two pretended nodes."""
        cores = sorted(os.sched_getaffinity(0))
        if len(cores) < 2:
            pytest.skip("two nodes need two cores")
        nodes = {0: frozenset(cores[:1]), 1: frozenset(cores[1:])}
        monkeypatch.setattr(numa, "read_nodes", lambda *_: nodes)
        return nodes

    def test_it_keeps_the_thread_and_those_that_it_starts(self, two_nodes: dict[int, frozenset[int]]) -> None:
        def run(call: Callable[[], object]) -> object:
            with ThreadPoolExecutor(1) as thread:
                return thread.submit(call).result()

        def settled() -> tuple[object, object, object]:
            return settle(CPU, 1, 2), os.sched_getaffinity(0), run(lambda: os.sched_getaffinity(0))

        before = os.sched_getaffinity(0)
        assert run(settled) == (Home(1, two_nodes[1], 1), two_nodes[1], two_nodes[1])
        assert os.sched_getaffinity(0) == before, "other threads stay where they were"

    @pytest.mark.usefixtures("two_nodes")
    def test_one_worker_on_cores_uses_all_of_them(self) -> None:
        before = os.sched_getaffinity(0)
        assert settle(CPU, 0, 1) is None
        assert os.sched_getaffinity(0) == before
