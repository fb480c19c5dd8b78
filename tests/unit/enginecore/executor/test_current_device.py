"""Threads that use a GPU make it their current device, because Triton and torch launch work on the current device.

In a new thread, the current device is device 0.
"""

import threading
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from penstock_enginecore.config import EngineCoreConfig, ExecutorConfig, ModelConfig
from penstock_enginecore.executor.worker import Worker
from penstock_enginecore.kv_transfer.kv_copy import WorkerCopies
from penstock_enginecore.lora.slot_copies import StagedCopies
from penstock_enginecore.worker.device_thread import DeviceThread, Late, begin_copy
from penstock_enginecore.worker.messages import WorkerConfig
from tests.fakes.fake_cudart import FakeCudart
from tests.fakes.patience import PATIENCE

SECOND = torch.device("cuda", 1)


class FakeCuda:
    """Fake of ``torch.cuda`` for two GPUs.

    Attributes:
        current: Current device by thread name. The other threads use device 0.
        used: Thread name and current device of each call that uses the current device.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.current: dict[str, torch.device] = {}
        self.used: list[tuple[str, torch.device]] = []
        self.driver = FakeCudart()
        stream = SimpleNamespace(wait_event=lambda event: None, synchronize=lambda: None)
        fakes = {
            "is_available": lambda: True,
            "device_count": lambda: 2,
            "get_device_capability": lambda device: (9, 0),
            "get_device_name": lambda device: "NVIDIA H100",
            "mem_get_info": lambda device: (1 << 36, 1 << 37),
            "set_device": self.set_device,
            "Event": lambda **options: self.use() or SimpleNamespace(record=lambda stream: None, synchronize=self.use),
            "Stream": lambda device: self.use() or stream,
            "stream": lambda stream: nullcontext(),
            "current_stream": lambda device: stream,
            "cudart": lambda: self.use() or self.driver,
        }
        for name, fake in fakes.items():
            monkeypatch.setattr(torch.cuda, name, fake)

    def set_device(self, device: torch.device) -> None:
        self.current[threading.current_thread().name] = device

    def use(self) -> None:
        name = threading.current_thread().name
        self.used.append((name, self.current.get(name, torch.device("cuda", 0))))


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    return FakeCuda(monkeypatch)


def test_a_worker_s_device_is_current_on_the_thread_that_launches_its_work(cuda: FakeCuda, tmp_path: Path) -> None:
    config = EngineCoreConfig(
        model=ModelConfig(path=str(tmp_path), device="cuda"), executor=ExecutorConfig(devices=(1,), numa=False)
    )
    thread = DeviceThread()
    thread.call(lambda: Worker(WorkerConfig(engine=config), None))
    thread.call(torch.cuda.cudart)
    thread.stop()
    assert cuda.used == [("device", SECOND)]


class OnGpu:
    """A tensor of the KV cache on the second GPU."""

    is_cuda = True
    device = SECOND
    shape = (4, 8)
    dtype = torch.uint8


def test_copies_of_kv_blocks_run_on_the_device_of_the_blocks(cuda: FakeCuda) -> None:
    memory: list[Any] = [OnGpu()]
    cuda.set_device(SECOND)  # as in the device thread, which calls begin
    copies = WorkerCopies(lambda: memory)
    copies.begin("reserve", 2).result(PATIENCE)
    assert sum(cuda.driver.registered.values()) == 16
    freed = copies.begin("read_slots", [0])
    copies.stop()
    freed.result(PATIENCE)
    copies._thread._thread.join(PATIENCE)
    assert cuda.driver.registered == {}  # memory is unregistered when the worker ends
    assert {name for name, _ in cuda.used} == {threading.current_thread().name, "kv copies"}
    assert {device for _, device in cuda.used} == {SECOND}


def test_adapters_are_copied_by_a_thread_whose_device_is_theirs(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, pin_memory, **options: empty(*size, **options))
    cuda.set_device(SECOND)  # as in the thread that loads the model
    copies = StagedCopies.on(SECOND)
    target = torch.zeros(8)
    copies.await_end(copies.begin([(target, torch.ones(8))]))
    copies.finish()
    assert target.all()
    assert {name for name, _ in cuda.used} == {threading.current_thread().name, "lora copies"}
    assert {device for _, device in cuda.used} == {SECOND}


def test_results_are_awaited_with_the_device_of_the_results(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    host = SimpleNamespace(copy_=lambda tensor, non_blocking: None, numpy=lambda: "tokens")
    monkeypatch.setattr(torch, "empty", lambda shape, dtype, pin_memory: host)
    cuda.current["device"] = SECOND
    tensor: Any = OnGpu()
    thread = DeviceThread()
    assert thread.submit(lambda: Late(begin_copy(tensor).wait)).result(PATIENCE) == "tokens"
    thread.stop()
    assert cuda.used == [("device", SECOND), ("completion", SECOND)]
