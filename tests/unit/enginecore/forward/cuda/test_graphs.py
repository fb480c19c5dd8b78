"""Steps captured at their first run and replayed from then on."""

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock_enginecore.core.worker_stats import GraphStats
from penstock_enginecore.forward.cuda import graphs
from penstock_enginecore.forward.cuda.decoder import FusedForward
from penstock_enginecore.forward.cuda.graphs import Padded, StepGraphs, cuda_graphs
from tests.fakes.models.fused_models import load_probed, prove, save_varied_model
from tests.fakes.models.recorded_launches import RecordedGraph, RecordedKernels


class CountingGraph:
    """A graph that logs its calls. ``fault`` is the reason why it cannot capture."""

    def __init__(self, log: list[str], fault: str | None = None) -> None:
        self.log = log
        self.fault = fault

    def capture(self, launch: Callable[[], torch.Tensor]) -> torch.Tensor:
        self.log.append("capture")
        if self.fault:
            raise RuntimeError(self.fault)
        return launch()

    def replay(self) -> None:
        self.log.append("replay")


def test_the_first_step_of_a_shape_is_launched_and_captured_and_later_ones_replayed() -> None:
    log: list[str] = []
    results = {shape: torch.zeros(1) for shape in ("a", "b")}
    steps = StepGraphs(lambda: CountingGraph(log))

    def run(shape: str) -> torch.Tensor:
        log.append(shape)
        return steps.run(shape, lambda: log.append("launch") or results[shape])

    for shape in ("a", "a", "b", "a"):
        assert run(shape) is results[shape]
    assert log == ["a", "launch", "capture", "launch", "a", "replay", "b", "launch", "capture", "launch", "a", "replay"]
    steps.clear()
    log.clear()
    run("b")
    assert log == ["b", "launch", "capture", "launch"]


def test_what_graphs_share_is_renewed_once_the_last_of_them_has_gone() -> None:
    renewed: list[str] = []
    steps = StepGraphs(lambda: CountingGraph([]), lambda: renewed.append("renewed"))
    steps.clear()
    assert not renewed
    for shape in ("a", "b"):
        steps.run(shape, lambda: torch.zeros(1))
    steps.clear()
    steps.clear()
    assert renewed == ["renewed"]


def test_replays_and_the_tokens_that_pad_them_are_counted() -> None:
    steps = StepGraphs(lambda: CountingGraph([]))
    result = torch.zeros(1)
    for shape, padding in (("a", 3), ("a", 2), ("b", 1), ("a", 1)):
        steps.run(shape, lambda: result, Padded(tokens=8, padding_tokens=padding, padding_rows=padding + 1))
    steps.count_launched()
    counts = {"captures": 2, "replays": 2, "launched": 3, "tokens": 16, "padding_tokens": 3, "padding_rows": 5}
    assert steps.stats == GraphStats(captured=2, **counts)
    steps.clear()
    assert steps.stats == GraphStats(captured=0, **counts)


class Captures:
    """Graphs of steps whose names are their shapes. ``faults`` are the errors of the next captures, by shape."""

    def __init__(self, **faults: list[str]) -> None:
        self.faults = faults
        self.log: list[str] = []
        self.rooms: list[int] = []
        self.renewed = 0
        self.steps = StepGraphs(
            lambda: CountingGraph(self.log, self.fault),
            self.renew,
            lambda: self.rooms.append(self.steps.stats.captured),
        )

    def renew(self) -> None:
        self.renewed += 1

    def run(self, *shapes: str) -> list[str]:
        """Run a step of each shape. Returns what the graphs did."""
        self.log.clear()
        for shape in shapes:
            pending = self.faults.get(shape, [])
            self.fault = pending[0] if pending else None
            before = len(self.log)
            self.steps.run(shape, lambda: torch.zeros(1))
            if "capture" in self.log[before:] and pending:
                pending.pop(0)
        return list(self.log)


REFUSED = "operation not permitted when stream is capturing"
SHORT = "CUDA out of memory. Tried to allocate 20.00 MiB"


def test_a_failed_capture_costs_the_graph_of_its_own_shape_alone(caplog: pytest.LogCaptureFixture) -> None:
    captures = Captures(a=[REFUSED])
    with caplog.at_level(logging.WARNING):
        assert captures.run("a", "a", "b", "b", "a", "b") == ["capture", "capture", "replay", "replay"]
    assert captures.steps.stats == GraphStats(captured=1, captures=1, failures=1, replays=2, launched=4)
    assert captures.steps.refuses("a")
    assert not captures.steps.failure  # other shapes are replayed
    [line] = caplog.messages
    assert line.endswith(f"(slower) shape=a reason={REFUSED}")
    captures.steps.clear()
    assert captures.run("a", "b") == ["capture"]  # the failure did not depend on the cleared tensors


def test_where_nothing_can_be_captured_three_shapes_are_tried() -> None:
    captures = Captures(**{shape: [REFUSED] for shape in "abcd"})
    assert captures.run("a", "b", "a") == ["capture", "capture"]
    assert captures.steps.failure == REFUSED
    assert not captures.steps.refuses("c")
    assert captures.run("c", "d", "e") == ["capture"]
    assert captures.steps.stats == GraphStats(failures=3, launched=6)


def test_a_capture_without_memory_drops_the_least_used_graphs_and_is_tried_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    captures = Captures(f=[SHORT])
    captures.run(*"abcde", *"abdeabde", "a")
    with caplog.at_level(logging.WARNING):
        captures.run("f")
    assert captures.steps.stats.captured == 3
    assert captures.rooms == [3]  # memory is freed after the graphs were dropped
    assert "dropped=2 left=3 attempts_left=2" in caplog.text
    assert captures.run("f", "f", *"abde") == ["capture", "replay", *["replay"] * 3]
    assert captures.run("c", "c") == []  # a dropped shape does not displace another one
    assert (captures.steps.stats.failures, captures.steps.stats.captures) == (1, 6)
    assert captures.renewed == 0
    captures.steps.clear()
    assert captures.run("c") == ["capture"]


def test_a_shape_that_never_finds_memory_is_tried_three_times() -> None:
    captures = Captures(a=["CUDA error: out of memory"] * 9)
    assert captures.run(*"aaaaaa") == ["capture"] * 3
    assert captures.renewed == 0  # there was no graph to drop
    assert captures.run("b", "b") == ["capture", "replay"]
    captures.steps.clear()
    assert captures.run(*"aaaa") == ["capture"] * 3


def test_the_last_dropped_graph_renews_the_shared_memory() -> None:
    captures = Captures(b=[SHORT])
    captures.run("a", "b")
    assert (captures.steps.stats.captured, captures.renewed) == (0, 1)
    assert captures.run("b", "b") == ["capture", "replay"]


@pytest.fixture
def fake_cuda(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Replace the parts of ``torch.cuda`` that graphs use. Returns the list of calls."""
    calls: list[Any] = []

    class FakeCUDAGraph:
        def capture_begin(self, pool: str, capture_error_mode: str) -> None:
            calls.append(("begin", pool, capture_error_mode))

        def capture_end(self) -> None:
            calls.append("end")

        def replay(self) -> None:
            calls.append("replay")

    def on(stream: str) -> AbstractContextManager[None]:
        calls.append(("on", stream))
        return nullcontext()

    fakes = {
        "CUDAGraph": FakeCUDAGraph,
        "Stream": lambda: "side stream",
        "graph_pool_handle": lambda: "pool",
        "synchronize": lambda: calls.append("synchronize"),
        "empty_cache": lambda: calls.append("empty cache"),
        "stream": on,
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(graphs.torch.cuda, name, fake)
    return calls


def test_a_graph_is_captured_on_a_stream_of_its_own_while_other_threads_go_on(fake_cuda: list[Any]) -> None:
    steps, result = cuda_graphs(), torch.zeros(1)
    for _ in range(2):
        assert steps.run("a", lambda: fake_cuda.append("launch") or result) is result
    begin = ("begin", "pool", "thread_local")
    assert fake_cuda == ["launch", "synchronize", ("on", "side stream"), begin, "launch", "end", "replay"]


def test_a_capture_that_fails_is_ended(fake_cuda: list[Any]) -> None:
    steps, result = cuda_graphs(), torch.zeros(1)
    answers: list[Any] = [result, RuntimeError("not permitted"), result]

    def launch() -> torch.Tensor:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    assert steps.run("a", launch) is result
    assert fake_cuda[-1] == "end"
    assert steps.run("a", launch) is result


def test_a_capture_without_memory_gives_unused_memory_back(fake_cuda: list[Any]) -> None:
    steps, result = cuda_graphs(), torch.zeros(1)
    answers: list[Any] = [result, torch.OutOfMemoryError("CUDA out of memory"), result, result]

    def launch() -> torch.Tensor:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    for _ in range(3):
        assert steps.run("a", launch) is result
    assert fake_cuda.count("empty cache") == 1
    assert fake_cuda[-1] == "replay"


def test_why_a_capture_fails_is_told_and_not_that_it_did(
    fake_cuda: list[Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def invalidated(self: object) -> None:
        raise RuntimeError("operation failed due to a previous error during capture")

    monkeypatch.setattr(torch.cuda.CUDAGraph, "capture_end", invalidated)
    steps, answers = cuda_graphs(), [torch.zeros(1), None]
    steps.run("a", lambda: answers.pop(0) if len(answers) > 1 else fails("model.layers.3: a read on the host"))
    assert steps.failure == "model.layers.3: a read on the host"
    assert "shape=a reason=model.layers.3: a read" in caplog.text


def fails(reason: str) -> torch.Tensor:
    raise RuntimeError(reason)


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
@torch.inference_mode()
def test_replayed_steps_of_a_model_are_proved_with_the_others(architecture: str, tmp_path: Path) -> None:
    save_varied_model(architecture, tmp_path)
    probed, kernels = load_probed(tmp_path), RecordedKernels()
    made: list[RecordedGraph] = []

    def make_graph() -> RecordedGraph:
        made.append(RecordedGraph(kernels))
        return made[-1]

    proven = prove(probed, lambda: FusedForward(probed, kernels, StepGraphs(make_graph)))
    assert proven.name, proven.reasons
    assert [graph.replays for graph in made] == [0, 2, 0]  # two decodes after the first one


class Stale(RecordedGraph):
    """A graph that embeds the token ids of the step it was captured in."""

    def replay(self) -> None:
        embed = [operation[0] for operation in self.recorder.seen].index("index_select", 1)
        self.recorder.work[embed] = lambda: None
        super().replay()


@torch.inference_mode()
def test_a_graph_that_computes_something_else_is_refuted(tmp_path: Path) -> None:
    save_varied_model("llama", tmp_path)
    probed, kernels = load_probed(tmp_path), RecordedKernels()
    proven = prove(probed, lambda: FusedForward(probed, kernels, StepGraphs(lambda: Stale(kernels))))
    assert proven.refuted
