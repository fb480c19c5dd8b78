"""A worker is killed or stopped at every point of its life.

The engine reports the failure and exits, and no process, file or shared memory remains.

With ``PENSTOCK_WORKER_FAILURES=full`` (``make worker-failures``) all points run, and each of two ranks is killed and
stopped. In this mode, the engine must also exit within a time limit. Otherwise only a few points run.
"""

import contextlib
import itertools
import logging
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from _pytest.logging import LogCaptureHandler

from penstock_common.types.request import EngineCoreRequest
from penstock_common.types.sampling import SamplingParams
from penstock_enginecore.core.busy_loop import BusyLoop
from penstock_enginecore.core.control import EngineControl
from penstock_enginecore.core.engine_core import EngineCore
from penstock_enginecore.core.steps_in_flight import EngineDeadError
from penstock_enginecore.executor.multiproc.executor import MultiprocExecutor
from penstock_enginecore.worker.failures import WorkersGone
from tests.fakes.engines.in_process import build_engine
from tests.fakes.engines.remains import Remains
from tests.fakes.engines.worker_faults import NAME, POINTS, VARIABLE, Fault, fired, installed
from tests.fakes.models.tiny_models import save_tiny_model
from tests.fakes.patience import PATIENCE

pytestmark = pytest.mark.slow

FULL = os.environ.get("PENSTOCK_WORKER_FAILURES") == "full"
STEP_TIMEOUT = 3.0
ENDING = 10.0
"""Seconds within which workers must exit after the engine ends."""
SOON = 1.0
"""Limit in seconds from a kill or a timeout to the engine's report. Checked only if no other tests run."""
ALL = [Fault(rank, point, does) for point, rank, does in itertools.product(POINTS, (0, 1), ("kill", "stop"))]
SOME = [Fault(1, "collective", "kill")]
TOLD = {"kill": r"worker {rank} \(pid {pid}\) was killed by SIGKILL", "stop": r"executor.step_timeout \(3 s\)"}


class Sink:
    """Records the messages for frontends."""

    def __init__(self) -> None:
        self.busy = threading.Event()
        self.on_drain = lambda: None
        self.dead: list[tuple[float, str]] = []

    def emit(self, client_id: str, outputs: Any) -> None:
        if any(output.offset > 2 for output in outputs.outputs):
            self.busy.set()

    def broadcast(self, outputs: Any, to: Any = None) -> None: ...

    def draining(self, timeout: float) -> None:
        self.on_drain()

    def engine_dead(self, reason: str) -> None:
        self.dead.append((time.monotonic(), reason))


class Loop(threading.Thread):
    """The busy loop of an engine."""

    def __init__(self, engine: EngineCore) -> None:
        super().__init__()
        self.sink = Sink()
        self.loop = BusyLoop(engine, EngineControl(engine), self.sink)
        self.error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self.loop.run()
        except EngineDeadError as e:
            self.error = e

    def ask(self, count: int) -> None:
        """Add requests that run until they reach the maximum length."""
        for number in range(count):
            params = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True)
            prompt = [1 + number, 5, 9]
            self.loop.add(
                "c", EngineCoreRequest(request_id=f"r{number}", prompt_token_ids=prompt, sampling_params=params)
            )


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    save_tiny_model("llama", path)
    return path


@pytest.fixture(scope="module")
def report() -> Iterator[list[str]]:
    lines: list[str] = []
    yield lines
    if FULL:
        print("", *lines, sep="\n")


@pytest.fixture
def armed_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the file with the fault for workers that start from now on."""
    for name, value in installed(tmp_path / "plugin").items():
        monkeypatch.setenv(name, value)
        monkeypatch.syspath_prepend(str(tmp_path / "plugin"))
    monkeypatch.setenv(VARIABLE, str(tmp_path / "fault"))
    return tmp_path / "fault"


def make_engine(model: Path, step_timeout: float) -> EngineCore:
    return build_engine(
        model,
        executor={"kind": "multiproc", "tensor_parallel_size": 2, "step_timeout": step_timeout},
        scheduler={"async_scheduling": True},
        plugins=(NAME,),
    )


def workers_of(engine: EngineCore) -> list[int]:
    assert isinstance(engine.executor, MultiprocExecutor)
    return engine.executor.pids


@contextlib.contextmanager
def serving(engine: EngineCore) -> Iterator[Loop]:
    loop = Loop(engine)
    try:
        yield loop
    finally:
        loop.loop.request_shutdown(0)
        loop.join(PATIENCE)
        engine.shutdown()
        assert not loop.is_alive()


def strike(fault: Fault, armed_at: Path, engine: EngineCore, loop: Loop) -> float:
    """Inject the fault into a serving engine. Returns the time of the fault."""
    if fault.point == "idle":
        os.kill(workers_of(engine)[fault.rank], signal.SIGKILL if fault.does == "kill" else signal.SIGSTOP)
        now = time.monotonic()
        if fault.does == "stop":
            loop.ask(1)  # an idle engine notices a stopped worker only at its next call
        loop.join(PATIENCE)
        return now
    loop.ask(8)
    assert loop.sink.busy.wait(PATIENCE)
    if fault.point == "draining":
        loop.sink.on_drain = lambda: fault.arm(armed_at)
        loop.loop.request_shutdown(PATIENCE)
    else:
        fault.arm(armed_at)
    loop.join(PATIENCE)
    return fired(armed_at) or float("nan")


class Outcome(msgspec.Struct):
    """Result of a run with a fault. Times are monotonic seconds.

    Attributes:
        told: Time of the fault.
        at: Time at which the engine reported the fault.
        pid: Regular expression for the worker's pid.
    """

    told: float | None
    at: float
    reason: str = ""
    pid: str = r"\d+"


def run(fault: Fault, model: Path, armed_at: Path, remains: Remains, timeout: float) -> Outcome:
    """Start an engine, inject the fault, and run the engine until it ends."""
    if fault.point in ("loading", "loaded"):
        fault.arm(armed_at)
        try:
            make_engine(model, timeout)
        except WorkersGone as e:
            return Outcome(fired(armed_at), time.monotonic(), str(e))
        raise AssertionError("the engine has started")
    engine = make_engine(model, timeout)
    remains.see(workers_of(engine))
    pid = str(workers_of(engine)[fault.rank])
    if fault.point == "ending":
        fault.arm(armed_at)
        engine.shutdown()
        return Outcome(fired(armed_at), time.monotonic(), pid=pid)
    with serving(engine) as loop:
        told = strike(fault, armed_at, engine, loop)
    assert loop.error is not None
    [(at, reason)] = loop.sink.dead
    return Outcome(told, at, reason, pid)


@pytest.mark.parametrize("fault", ALL if FULL else SOME, ids=lambda f: f"{f.point.replace(' ', '-')}-{f.rank}-{f.does}")
def test_the_engine_ends_and_leaves_nothing_behind(
    fault: Fault, model: Path, armed_at: Path, caplog: pytest.LogCaptureFixture, report: list[str]
) -> None:
    remains = Remains()
    timeout = PATIENCE if fault.does == "kill" else STEP_TIMEOUT
    outcome = run(fault, model, armed_at, remains, timeout)
    assert outcome.told is not None, "the worker did not come to that point"
    limit = ENDING if fault.point == "ending" else timeout
    took = outcome.at - outcome.told - (0.0 if fault.does == "kill" else limit)
    report.append(f"{fault.point:14} rank {fault.rank} {fault.does}  {took:6.3f} s  {outcome.reason}")
    if outcome.reason:
        expected = TOLD[fault.does].format(rank=fault.rank, pid=outcome.pid)
        assert re.search(expected, outcome.reason), outcome.reason
    if fault.does == "stop":
        stacks = {record.args[0]: record.args[1] for record in caplog.records if "stack traces" in record.getMessage()}
        assert "it is stopped" in stacks[fault.rank]
        other = "the process has ended" if fault.point == "ending" else "File "  # the other worker finished its command
        assert other in stacks[1 - fault.rank]
    for handler in logging.getLogger().handlers:
        if isinstance(handler, LogCaptureHandler):
            handler.clear()  # errors contain the engine's id
    assert remains.left() == []
    assert not FULL or took < SOON


def test_one_logit_that_another_worker_has_otherwise_ends_the_engine_in_that_step(model: Path, armed_at: Path) -> None:
    engine = make_engine(model, PATIENCE)
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    for number in range(3):
        request = EngineCoreRequest(request_id=f"r{number}", prompt_token_ids=[1 + number, 5], sampling_params=params)
        engine.add(engine.preprocess("c", request))
    for _ in range(2):
        engine.step(lambda: None)
    steps = engine.scheduler.stats().step_counter
    Fault(1, "executed", "flip").arm(armed_at)
    with pytest.raises(EngineDeadError, match="workers 0 and 1 sampled different tokens"):
        while True:
            engine.step(lambda: None)
    assert fired(armed_at) is not None
    assert engine.scheduler.stats().step_counter - steps <= 2  # the steps that were in flight
    engine.shutdown()
