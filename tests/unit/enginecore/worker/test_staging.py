"""The ring of page-locked memory, and the order of a GPU's streams and events."""

from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from penstock_enginecore.worker.staging import GpuStream, StagingRing
from tests.fakes.deferred_stream import DeferredStream

CPU, GPU = torch.device("cpu"), torch.device("cuda", 1)


def test_a_piece_is_not_used_again_before_its_work_is_over() -> None:
    stream = DeferredStream()
    ring = StagingRing(2, 4, stream, CPU)
    target = torch.zeros(12, dtype=torch.uint8)
    ring.upload(target, torch.arange(12, dtype=torch.uint8))
    assert stream.calls == ["launch", "launch", "wait", "run", "launch"]
    assert stream.running == 2
    ring.settle()
    assert target.tolist() == list(range(12))


def test_work_that_fails_late_is_raised_by_the_wait() -> None:
    stream = DeferredStream()
    ring = StagingRing(1, 4, stream, CPU)

    def fail() -> None:
        raise OSError("no such device")

    ring.take().launch(fail)
    with pytest.raises(OSError, match="no such device"):
        ring.settle()


def test_the_memory_can_be_written_outside_of_inference_mode() -> None:
    with torch.inference_mode():
        ring = StagingRing(1, 4, DeferredStream(), CPU)
    ring.take().memory.zero_()


def test_the_memory_of_a_gpu_is_page_locked(monkeypatch: pytest.MonkeyPatch) -> None:
    empty, locked = torch.empty, list[tuple[tuple[int, ...], bool]]()

    def allocate(*size: int, pin_memory: bool, **options: Any) -> torch.Tensor:
        locked.append((size, pin_memory))
        return empty(*size, **options)

    monkeypatch.setattr(torch, "empty", allocate)
    StagingRing(3, 8, DeferredStream(), GPU)
    StagingRing(3, 8, DeferredStream(), CPU)
    assert locked == [((3, 8), True), ((3, 8), False)]

    def refuse(*size: int, **options: Any) -> torch.Tensor:
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(torch, "empty", refuse)
    with pytest.raises(MemoryError, match="cannot allocate 24 bytes of page-locked host memory: CUDA error"):
        StagingRing(3, 8, DeferredStream(), GPU)


def test_copies_on_a_gpu_run_behind_the_steps_and_before_the_steps_that_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    class Stream:
        def __init__(self, name: str) -> None:
            self.name = name

        def wait_event(self, event: Any) -> None:
            calls.append((self.name, "waits for", event.of))

    class Event:
        def __init__(self, blocking: bool) -> None:
            assert blocking
            self.of = ""

        def record(self, stream: Stream) -> None:
            self.of = stream.name

        def synchronize(self) -> None:
            calls.append(("host", "waits for", self.of))

    @contextmanager
    def on(stream: Stream) -> Any:
        calls.append(("current", stream.name))
        yield
        calls.append(("current", "steps"))

    fakes = SimpleNamespace(
        Stream=lambda device: Stream("copies"),
        Event=Event,
        stream=on,
        current_stream=lambda device: Stream("steps"),
        set_device=lambda device: calls.append(("device", device)),
    )
    for name, fake in vars(fakes).items():
        monkeypatch.setattr(torch.cuda, name, fake)
    stream = GpuStream(GPU)
    with stream.after(stream.launched()):
        stream.launch(lambda: calls.append("copy"))
        end = stream.mark()
    stream.join(end)
    stream.wait(end)
    assert calls == [
        ("device", GPU),
        ("current", "copies"),
        ("copies", "waits for", "steps"),
        "copy",
        ("current", "steps"),
        ("steps", "waits for", "copies"),
        ("host", "waits for", "copies"),
    ]
