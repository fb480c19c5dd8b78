"""The processes beside the engine are there before the first constraint, and where they cannot be, nobody waits for them."""

import logging
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from penstock_common.errors import Internal, Unimplemented
from penstock_enginecore.config import EngineCoreConfig, ModelConfig, StructuredOutputConfig
from penstock_enginecore.structured_output.backend import XgrammarBackend
from penstock_enginecore.structured_output.children import COMPILER, FOLLOWER, Children, Compiler, Follower
from penstock_enginecore.structured_output.factory import make_grammar_backend
from tests.fakes.engine_harness import make_engine
from tests.fakes.fake_executor import FakeExecutor
from tests.fakes.fake_grammars import FakeGrammars
from tests.fakes.followed import follow

MODEL = Path(__file__).resolve().parents[3] / "examples/demo_model/penstock-tiny"
NO_MODULE = "tests.fakes.there_is_no_such_module"
TIMEOUT = 120


def backend_with(children: Children | None = None, path: Path = MODEL, eos: int = 1) -> XgrammarBackend:
    config = EngineCoreConfig(model=ModelConfig(path=str(path)))
    made = make_grammar_backend(config, vocab_size=2048, eos_token_ids=frozenset({eos}), children=children)
    assert isinstance(made, XgrammarBackend)
    return made


@pytest.fixture
def started() -> Iterator[Children]:
    """Processes that were started early."""
    children = Children(StructuredOutputConfig())
    children.start_early()
    yield children
    children.close()
    children.thread.shutdown()


def started_early(children: Children) -> tuple[Compiler, Follower]:
    """The processes, which nobody has taken yet."""
    compiler, follower = children.thread.submit(lambda: (children._early_compiler, children._early_follower)).result()
    assert compiler is not None
    assert follower is not None
    return compiler, follower


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


def test_processes_that_were_started_early_are_the_ones_that_serve(started: Children):
    compiler, follower = started_early(started)
    backend = backend_with(started)
    try:
        backend.warm_up().result(TIMEOUT)
        assert (backend.compiler_pid, backend._follower.pid) == (compiler.process.pid, follower.process.pid)
    finally:
        backend.shutdown()


@pytest.mark.parametrize("modules", [(NO_MODULE, FOLLOWER), (COMPILER, NO_MODULE)])
def test_a_process_that_does_not_start_is_an_error(modules: tuple[str, str]):
    backend = backend_with(Children(StructuredOutputConfig(), modules))
    try:
        with pytest.raises(Internal, match="the process that .* constraints did not start"):
            backend.warm_up().result(TIMEOUT)
    finally:
        backend.shutdown()


def test_processes_that_nobody_will_ask_for_end(started: Children):
    compiler, follower = started_early(started)
    backend = backend_with(started, eos=2048)
    backend.warm_up().result(TIMEOUT)
    assert compiler.process.returncode is not None
    assert follower.process.returncode is not None
    backend.shutdown()


def test_without_a_tokenizer_there_is_nothing_to_warm_up(started: Children, tmp_path: Path):
    backend = backend_with(started, path=tmp_path)
    with pytest.raises(Unimplemented, match="this engine has no tokenizer"):
        backend.warm_up().result(TIMEOUT)
    assert started._early_compiler is None
    backend.shutdown()


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
    assert "constraints cannot be served now" in record.message
    assert "did not start (exit code 1)" in caplog.text


def test_an_engine_without_a_tokenizer_only_notes_it(caplog: pytest.LogCaptureFixture):
    grammars = FakeGrammars()
    grammars.warm.set_exception(Unimplemented("this engine has no tokenizer"))
    engine = engine_with(grammars)
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        engine.warm_up()
    assert not caplog.records
