"""The engine's helper processes start before the first constraint. If they cannot start, no request waits for them."""

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from penstock_common.errors import Internal, Unimplemented
from penstock_enginecore.config import EngineCoreConfig, ModelConfig, StructuredOutputConfig
from penstock_enginecore.structured_output.backend import XgrammarBackend
from penstock_enginecore.structured_output.factory import make_grammar_backend
from penstock_enginecore.structured_output.grammar_processes import Children
from tests.fakes.engines.engine_harness import make_engine
from tests.fakes.engines.fake_executor import FakeExecutor
from tests.fakes.engines.fake_grammars import FakeGrammars
from tests.fakes.engines.followed import follow

MODEL = Path(__file__).resolve().parents[4] / "examples/demo_model/penstock-tiny"
NO_MODULE = "tests.fakes.there_is_no_such_module"
TIMEOUT = 120


def backend_with(children: Children | None = None, path: Path = MODEL, eos: int = 1) -> XgrammarBackend:
    config = EngineCoreConfig(model=ModelConfig(path=str(path)))
    made = make_grammar_backend(config, vocab_size=2048, eos_token_ids=frozenset({eos}), children=children)
    assert isinstance(made, XgrammarBackend)
    return made


@pytest.fixture
def started() -> Iterator[Children]:
    """Yield the processes that were started early."""
    children = Children(StructuredOutputConfig())
    children.start_early()
    yield children
    children.close()
    children.thread.shutdown()


def started_early(children: Children) -> int:
    """Return the pid of the process, which has had no work yet."""
    pid = children.thread.submit(lambda: children.pid).result()
    assert pid is not None
    return pid


def test_a_warm_backend_has_both_processes_and_constraints_use_them(started: Children):
    backend = backend_with(started)
    try:
        assert backend.compiler_pid is None
        backend.warm_up().result(TIMEOUT)
        pids = backend.compiler_pid, backend._follower.pid
        assert None not in pids
        follow(backend, regex="ab")
        assert (backend.compiler_pid, backend._follower.pid) == pids
    finally:
        backend.shutdown()


def test_what_was_started_early_has_the_processes_that_serve(started: Children):
    parent = started_early(started)
    backend = backend_with(started)
    try:
        backend.warm_up().result(TIMEOUT)
        assert {_parent_of(backend.compiler_pid), _parent_of(backend._follower.pid)} == {parent}
    finally:
        backend.shutdown()
    assert _are_gone(parent)


def test_a_process_that_does_not_start_is_an_error():
    backend = backend_with(Children(StructuredOutputConfig(), NO_MODULE))
    try:
        with pytest.raises(Internal, match=r"the process that computes grammar masks did not start \(exit code 1\)"):
            backend.warm_up().result(TIMEOUT)
    finally:
        backend.shutdown()


@pytest.mark.slow
def test_constraints_are_served_again_when_all_processes_were_lost(started: Children):
    backend = backend_with(started)
    try:
        backend.warm_up().result(TIMEOUT)
        os.kill(started_early(started), signal.SIGKILL)
        for pid in (backend.compiler_pid, backend._follower.pid):
            assert _are_gone(pid)
        _until(lambda: not backend._follower.running)
        follow(backend, regex="ab")
    finally:
        backend.shutdown()


@pytest.mark.slow
def test_another_compiling_process_does_not_import_the_library_again(started: Children):
    backend = backend_with(started)
    try:
        backend.warm_up().result(TIMEOUT)
        before, parent = backend.compiler_pid, started_early(started)
        os.kill(before or 0, signal.SIGKILL)
        _until(lambda: backend.compiler_pid is None)
        follow(backend, regex="ab")
        assert _parent_of(backend.compiler_pid) == parent
    finally:
        backend.shutdown()


def test_processes_that_nobody_will_ask_for_end(started: Children):
    parent = started_early(started)
    backend = backend_with(started, eos=2048)
    backend.warm_up().result(TIMEOUT)
    assert _are_gone(parent)
    backend.shutdown()


def test_without_a_tokenizer_there_is_nothing_to_warm_up(started: Children, tmp_path: Path):
    parent = started_early(started)
    backend = backend_with(started, path=tmp_path)
    with pytest.raises(Unimplemented, match="this engine has no tokenizer"):
        backend.warm_up().result(TIMEOUT)
    assert _are_gone(parent)
    backend.shutdown()


def _parent_of(pid: int | None) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def _are_gone(*pids: int | None) -> bool:
    """Wait until the processes have ended."""
    _until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))
    return True


def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def engine_with(grammars: FakeGrammars):
    return make_engine(FakeExecutor(vocab_size=50, eos_token_ids=frozenset({7})), grammars=grammars)


def test_an_engine_is_warm_only_once_its_constraints_are():
    grammars = FakeGrammars()
    engine, done = engine_with(grammars), threading.Event()
    with ThreadPoolExecutor(1) as thread:
        warming = thread.submit(lambda: (engine.warm_up(), done.is_set()))
        assert not warming.done()
        done.set()
        grammars.warm.set_result(None)
        assert warming.result(TIMEOUT)[1]


def test_an_engine_whose_processes_do_not_start_says_so_and_serves(caplog: pytest.LogCaptureFixture):
    grammars = FakeGrammars()
    grammars.warm.set_exception(Internal("the process that compiles constraints did not start (exit code 1)"))
    engine = engine_with(grammars)
    caplog.clear()
    with caplog.at_level(logging.ERROR):
        engine.warm_up()
    [record] = caplog.records
    assert "cannot prepare structured outputs" in record.message
    assert "did not start (exit code 1)" in caplog.text


def test_an_engine_without_a_tokenizer_only_notes_it(caplog: pytest.LogCaptureFixture):
    grammars = FakeGrammars()
    grammars.warm.set_exception(Unimplemented("this engine has no tokenizer"))
    engine = engine_with(grammars)
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        engine.warm_up()
    assert not caplog.records
