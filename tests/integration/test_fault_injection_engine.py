"""Errors at every boundary of the engine: one request ends, and another running request is unaffected."""

import logging
import re
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from penstock.common.v1 import finish_pb2
from penstock_common.errors import InvalidArgument
from penstock_common.observability.tracing import Tracer
from penstock_enginecore.core import engine_core
from penstock_enginecore.core.kv_cache.manager import KVCacheManager
from penstock_enginecore.core.scheduler.results import StepResults
from penstock_enginecore.core.scheduler.scheduler import DefaultScheduler
from penstock_enginecore.core.scheduler.waiting_queue import FairQueue
from penstock_enginecore.rpc import convert, servicer
from penstock_enginecore.rpc.traces import EngineTraces
from tests.fakes.clients.session_client import SessionClient, connected
from tests.fakes.engines.engine_harness import assert_nothing_left, make_config
from tests.fakes.engines.engine_server import EngineServer, wait_until
from tests.fakes.engines.fake_executor import FakeExecutor, oracle_tokens

pytestmark = pytest.mark.slow

LENGTH = 40
BAD = "bad"


class UnprintableError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("not even its text")


ERRORS = [RuntimeError("injected"), RecursionError("injected"), MemoryError(), UnprintableError()]


@pytest.fixture(params=[{}, {"async_scheduling": True}], ids=["one step", "steps in flight"])
def server(request: pytest.FixtureRequest) -> Any:
    executor = FakeExecutor(model_max_len=1000, available_memory=2**24)
    server = EngineServer(make_config(num_blocks=None, **request.param), executor).start().load()
    yield server
    server.stop()
    assert server.failure is None


@pytest.fixture
async def client(server: EngineServer) -> AsyncIterator[SessionClient]:
    async with connected(server.address) as client:
        yield client


def name_of(argument: Any) -> str:
    """Return the request id in an argument of a patched method.

    The argument is a request, a request's protobuf message, an output, or a list of ids.
    """
    return getattr(argument, "request_id", "") or " ".join(argument if isinstance(argument, list) else [])


def inject(
    monkeypatch: pytest.MonkeyPatch,
    owner: Any,
    method: str,
    error: Exception,
    *,
    of: Callable[..., Any],
    calls: int = 1,
) -> None:
    """Make ``method`` raise for the bad request, starting with its ``calls``-th call.

    ``of`` returns the request of a call.
    """
    original = getattr(owner, method)
    seen = 0

    def raising(*arguments: Any, **keywords: Any) -> Any:
        nonlocal seen
        if name_of(of(*arguments)) == BAD:
            seen += 1
            if seen >= calls:
                raise type(error)(*error.args)
        return original(*arguments, **keywords)

    monkeypatch.setattr(owner, method, raising)


def first(argument: Any, *_: Any) -> Any:
    return argument


def tokens(output: Any) -> Any:
    """Return the output, or None if the output reports an error."""
    return output if output.error is None else None


def second(_: Any, argument: Any, *__: Any) -> Any:
    return argument


BOUNDARIES = {
    "decoding": (convert, "request_from_proto", first, 1),
    "validating": (engine_core, "validate_request", first, 1),
    "hashing": (KVCacheManager, "hash_prompt", second, 1),
    "queueing": (DefaultScheduler, "add_request", second, 1),
    "queueing, halfway": (FairQueue, "add", second, 1),
    "looking for cached blocks": (KVCacheManager, "get_computed_blocks", second, 1),
    "admitting": (KVCacheManager, "admit", second, 1),
    "starting": (KVCacheManager, "block_ids", second, 1),
    "allocating": (KVCacheManager, "allocate_slots", second, 3),
    "caching blocks": (KVCacheManager, "cache_blocks", second, 2),
    "taking in the first token": (StepResults, "_advance", second, 1),
    "taking in a later token": (StepResults, "_advance", second, 7),
    "encoding the first output": (convert, "output_to_proto", tokens, 1),
    "encoding a later output": (convert, "output_to_proto", tokens, 11),
}


@pytest.mark.parametrize("error", ERRORS[:2], ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("boundary", BOUNDARIES)
async def test_an_error_caused_by_a_request_ends_only_that_request(
    client: SessionClient,
    server: EngineServer,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    boundary: str,
    error: Exception,
) -> None:
    owner, method, of, calls = BOUNDARIES[boundary]
    inject(monkeypatch, owner, method, error, of=of, calls=calls)
    with caplog.at_level(logging.ERROR):
        await client.add("neighbour", seed=1, max_tokens=LENGTH)
        await client.until(lambda: client.tokens.get("neighbour"))
        await client.add(BAD, seed=2, max_tokens=LENGTH)
        await client.add("behind", seed=3, max_tokens=LENGTH)
        await client.until_ended("neighbour", BAD, "behind")
    assert client.tokens["neighbour"] == oracle_tokens(1, LENGTH, 1000)
    assert client.tokens["behind"] == oracle_tokens(3, LENGTH, 1000)
    assert_told_and_logged_once(client, caplog)
    wait_until(lambda: not server.engine.has_work)
    assert_nothing_left(server.engine)


def assert_told_and_logged_once(client: SessionClient, caplog: pytest.LogCaptureFixture) -> None:
    end = client.ends[BAD]
    assert end.finish_reason == finish_pb2.FINISH_REASON_ERROR
    assert (end.error.code, end.error.reason) == ("INTERNAL", "INCIDENT")
    (record,) = [record for record in caplog.records if record.exc_info]
    (number,) = re.findall(r"incident ([0-9a-f]{8})", end.error.message)
    assert record.__dict__["incident"] == number


@pytest.mark.parametrize("times", [1, 5])
async def test_an_id_can_be_used_again_after_an_incident(
    client: SessionClient, server: EngineServer, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    """Makes the encoding of an output fail, so that the engine ends the request."""
    with monkeypatch.context() as injected:
        inject(injected, convert, "output_to_proto", RuntimeError("injected"), of=tokens, calls=times)
        await client.add(BAD, max_tokens=900)
        await client.until_ended(BAD)
    wait_until(lambda: not server.engine.has_work)
    del client.ends[BAD], client.tokens[BAD]
    await client.add(BAD, seed=4, max_tokens=9)
    await client.until_ended(BAD)
    assert client.tokens[BAD] == oracle_tokens(4, 9, 1000)


@pytest.mark.parametrize(
    ("owner", "method"), [(DefaultScheduler, "abort_requests"), (servicer.BusyLoop, "abort")], ids=["loop", "servicer"]
)
async def test_an_abort_that_breaks_breaks_nothing_else(
    client: SessionClient, server: EngineServer, monkeypatch: pytest.MonkeyPatch, owner: Any, method: str
) -> None:
    await client.add("neighbour", seed=1, max_tokens=LENGTH)
    await client.add(BAD, seed=2, max_tokens=LENGTH)
    inject(monkeypatch, owner, method, RuntimeError("injected"), of=lambda _, __, ids: list(ids))
    await client.abort(BAD)
    await client.until_ended("neighbour", BAD)
    assert client.tokens["neighbour"] == oracle_tokens(1, LENGTH, 1000)


async def test_the_end_of_a_session_that_breaks_does_not_reach_others(
    client: SessionClient, server: EngineServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with connected(server.address, "leaver") as leaver:
        await leaver.add(BAD, max_tokens=4)
        await leaver.until_ended(BAD)

        def broken(*_: Any) -> None:
            raise RuntimeError("injected")

        monkeypatch.setattr(DefaultScheduler, "abort_client", broken)
    await client.add("neighbour", seed=1, max_tokens=LENGTH)
    await client.until_ended("neighbour")
    assert client.tokens["neighbour"] == oracle_tokens(1, LENGTH, 1000)


class BrokenTracer(Tracer):
    """Tracer whose every method raises."""

    def __init__(self) -> None:
        self.calls = 0

    def record(self, *_: Any, **__: Any) -> None:
        self.calls += 1
        raise RuntimeError("injected")


TRACED = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}


@pytest.mark.parametrize("method", ["record", "__init__"])
async def test_a_trace_that_cannot_be_written_costs_no_request_its_answer(
    client: SessionClient, server: EngineServer, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    server.io.sessions.traces = EngineTraces(BrokenTracer(), model="m")
    if method == "__init__":

        def broken(*_: Any) -> None:
            raise RuntimeError("injected")

        monkeypatch.setattr("penstock_enginecore.rpc.traces._TracedRequest.__init__", broken)
    await client.add("traced", seed=1, max_tokens=LENGTH, trace_context=TRACED)
    await client.until_ended("traced")
    assert client.tokens["traced"] == oracle_tokens(1, LENGTH, 1000)
    assert len(server.io.sessions.traces) == 0


async def test_an_error_whose_text_cannot_be_encoded_ends_its_request(
    client: SessionClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Uses a lone surrogate, which JSON can contain and UTF-8 cannot encode."""
    error = InvalidArgument("the type '\ud800' is unknown")
    inject(monkeypatch, engine_core, "validate_request", error, of=first)
    await client.add(BAD)
    await client.until_ended(BAD)
    assert client.ends[BAD].error.reason == "INCIDENT"


def recursive() -> list[Any]:
    value: list[Any] = []
    value.append(value)
    return value


RESULTS = {"object": object(), "too large": 2**70, "recursive": recursive(), "surrogate": "\ud800"}


@pytest.mark.parametrize("result", RESULTS.values(), ids=RESULTS)
async def test_a_utilitys_result_without_a_form_is_that_calls_error(
    client: SessionClient, server: EngineServer, result: Any
) -> None:
    server.executor.rpc_results["probe"] = result
    await client.add("neighbour", seed=1, max_tokens=LENGTH)
    with pytest.raises(AssertionError, match="INTERNAL: collective_rpc failed"):
        await client.utility("collective_rpc", "probe")
    await client.until_ended("neighbour")
    assert client.tokens["neighbour"] == oracle_tokens(1, LENGTH, 1000)


@pytest.mark.parametrize("error", [*ERRORS, UnicodeEncodeError("utf-8", "\ud800", 0, 1, "surrogates \ud800")], ids=repr)
async def test_a_utility_that_raises_ends_nothing_else(
    client: SessionClient, server: EngineServer, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    # pytest sends log records between processes as UTF-8, and UTF-8 cannot encode a lone surrogate.
    caplog.set_level(logging.CRITICAL)
    server.executor.rpc_results["probe"] = error
    await client.add("neighbour", seed=1, max_tokens=LENGTH)
    with pytest.raises(AssertionError, match="INTERNAL: "):
        await client.utility("collective_rpc", "probe")
    await client.until_ended("neighbour")
    assert client.tokens["neighbour"] == oracle_tokens(1, LENGTH, 1000)


async def test_a_utility_takes_a_megabyte_of_arguments(client: SessionClient, server: EngineServer) -> None:
    server.executor.rpc_results["probe"] = True
    assert await client.utility("collective_rpc", "probe", ["x" * 2**20, list(range(10_000))]) == [True]
    with pytest.raises(AssertionError, match="INVALID_ARGUMENT: collective_rpc: argument 'method' is wrong"):
        await client.utility("collective_rpc", ["x" * 2**20])
