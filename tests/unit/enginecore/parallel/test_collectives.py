"""Collectives between GPUs, tested without a GPU: torch's calls are the same for every backend, and the tests use gloo."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from penstock_common.errors import ConfigError
from penstock_enginecore.parallel.collectives import DeviceCollectives, NcclCollectives, gloo_group, nccl_group
from penstock_enginecore.parallel.meeting import Meeting
from tests.fakes.engines.thread_collectives import thread_ranks
from tests.fakes.patience import PATIENCE


class Recorder:
    """``Collectives`` that record their calls."""

    def __init__(self, rank: int = 0, size: int = 2) -> None:
        self.rank, self.size = rank, size
        self.asked: list[str] = []

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        self.asked.append("all_reduce")
        return tensor

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        self.asked.append("all_gather")
        return [tensor] * self.size


def on_ranks(size: int, do: Any) -> list[Any]:
    """Run ``do`` on each rank of a group of threads. Returns the results by rank."""
    store = os.memfd_create("store")
    with ThreadPoolExecutor(size) as pool:
        groups = list(pool.map(lambda rank: gloo_group(Meeting(store), "test", rank, size), range(size)))
        found = list(pool.map(lambda rank: do(NcclCollectives(groups[rank], rank, size)), range(size)))
    os.close(store)
    return found


def test_a_group_may_be_destroyed_after_its_descriptor_was_closed() -> None:
    """torch opens the store's file again at the end. In a child process, because an error would abort the process."""
    program = """
import os
import torch
from penstock_enginecore.parallel.collectives import gloo_group
from penstock_enginecore.parallel.meeting import Meeting
store = os.memfd_create("store")
group = gloo_group(Meeting(store), "test", 0, 1)
os.close(store)
reused = os.pipe()
assert store in reused
del group
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=PATIENCE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("size", [2, 3])
def test_sums_are_the_same_on_all_ranks_and_in_place(size: int, dtype: torch.dtype) -> None:
    own = [torch.arange(12, dtype=dtype).view(3, 4) * (rank + 1) for rank in range(size)]
    expected = torch.stack(own).sum(0)
    for rank, total in enumerate(on_ranks(size, lambda collectives: collectives.all_reduce(own[collectives.rank]))):
        assert total is own[rank]
        torch.testing.assert_close(total, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64])
def test_every_rank_gets_what_all_have(dtype: torch.dtype) -> None:
    def gather(collectives: NcclCollectives) -> list[torch.Tensor]:
        whole = torch.arange(20, dtype=dtype).view(4, 5) + 100 * collectives.rank
        return collectives.all_gather(whole[:, 1:3])  # not contiguous

    for gathered in on_ranks(3, gather):
        for rank, part in enumerate(gathered):
            assert part.tolist() == (torch.arange(20, dtype=dtype).view(4, 5)[:, 1:3] + 100 * rank).tolist()


def test_tensors_go_by_where_they_are() -> None:
    host, device = Recorder(), Recorder()
    both = DeviceCollectives(host, device)
    both.all_reduce(torch.ones(2))
    both.all_gather(torch.ones(2, device="meta"))
    assert (host.asked, device.asked) == (["all_reduce"], ["all_gather"])
    both.all_gather(torch.ones(2))
    both.all_reduce(torch.ones(2, device="meta"))
    assert (host.asked, device.asked) == (["all_reduce", "all_gather"], ["all_gather", "all_reduce"])
    assert (both.rank, both.size) == (0, 2)


def test_a_rank_is_the_same_on_host_and_device() -> None:
    first, second = thread_ranks(2)
    with pytest.raises(
        ValueError, match="rank 0 of 2 of the CPU group must have the same rank in the GPU group, not 1 of 2"
    ):
        DeviceCollectives(first, second)


def test_a_torch_without_nccl_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.distributed.is_nccl_available", lambda: False)
    meeting = Meeting(os.memfd_create("store"))
    with pytest.raises(ConfigError, match="workers on GPUs need NCCL, but this torch was built without NCCL"):
        nccl_group(meeting, "test", 0, 2, torch.device("cuda", 0))


def test_nccl_listens_on_loopback_unless_the_environment_overrides_it(monkeypatch: pytest.MonkeyPatch) -> None:
    class Group:
        def __init__(self, *_: object) -> None:
            self.interface = os.environ["NCCL_SOCKET_IFNAME"]

        Options = SimpleNamespace

        def eager_connect_single_device(self, device: torch.device) -> None:
            pass

    monkeypatch.setattr("torch.distributed.is_nccl_available", lambda: True)
    monkeypatch.setattr("torch.distributed.ProcessGroupNCCL", Group, raising=False)
    monkeypatch.setattr("torch.cuda.set_device", lambda _: None)
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "")  # restored at the end of the test
    for given, expected in ((None, "=lo"), ("eth0", "eth0")):
        monkeypatch.delenv("NCCL_SOCKET_IFNAME")
        if given is not None:
            monkeypatch.setenv("NCCL_SOCKET_IFNAME", given)
        group = nccl_group(Meeting(os.memfd_create("store")), "test", 0, 2, torch.device("cuda", 0))
        assert group.interface == expected
