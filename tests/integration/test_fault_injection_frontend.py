"""An error in the frontend ends only the request that caused the error.

Each tested place raises while another request runs.
"""

import asyncio
import json
import logging
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from penstock.common.v1 import events_pb2, finish_pb2, stats_pb2, tensor_pb2
from penstock.enginecore.v1 import messages_pb2 as engine_pb
from penstock.inference.v1 import messages_pb2 as pb
from penstock_common.errors import RequestFailed
from penstock_common.rpc.interceptor import CallTelemetry
from penstock_frontend.api.grpc import messages as grpc_messages
from penstock_frontend.api.openai.chat_completions import ChatCompletions
from penstock_frontend.api.openai.completions import ChoiceWriter, Completions
from penstock_frontend.api.vllm import messages as vllm_messages
from penstock_frontend.calls.live_request import ObservedRequest, RequestObserver
from penstock_frontend.dispatch.journal import Journal, JournalEntry
from penstock_frontend.dispatch.kv_events import KvEventFeed
from penstock_frontend.metrics import EngineMetrics, FrontendMetrics
from penstock_frontend.processing.chat.answers import ChatOutputs
from penstock_frontend.processing.chat.rendering import ChatRenderer
from penstock_frontend.processing.outputs.pooling import PooledOutputs
from penstock_frontend.processing.outputs.processor import OutputProcessor
from penstock_frontend.processing.prompts.input import InputProcessor
from penstock_frontend.processing.prompts.pooling import PoolingInputs
from penstock_frontend.processing.prompts.tokenizer import Tokenizer
from tests.fakes.clients.vllm_client import VllmClient
from tests.fakes.engines.fake_engine import FakeEngine, token_at
from tests.fakes.frontends.frontend_server import FrontendServer, collect, failure, make_request
from tests.fakes.frontends.openai_server import OpenAIServer, openai_server
from tests.fakes.models.chat_templates import save_chat_model
from tests.fakes.models.small_tokenizers import byte_level
from tests.fakes.patience import PATIENCE

pytestmark = pytest.mark.slow

POISON = "poison"
PANIC_TOKEN = 2**31
"""Token outside every vocabulary, so that the other request never contains the token."""
NEIGHBOUR: dict[str, Any] = {"text": "hello", "seed": 11, "max_tokens": 60}
UNDISTURBED = byte_level().decode([token_at(11, i, vocab_size=byte_level().get_vocab_size()) for i in range(60)])
INCIDENT = re.compile(r"incident ([0-9a-f]{8})$")


class System(NamedTuple):
    """A frontend, and an engine that runs a step only on command."""

    api: OpenAIServer
    engine: FakeEngine

    @property
    def frontend(self) -> FrontendServer:
        return self.api.server

    def live(self) -> dict[str, int]:
        """Return the requests that the frontend and the engine have not released."""
        frontend = self.frontend.frontend
        dispatch = frontend._models[0].assembly.engines._dispatch
        return {
            "accepted": frontend._models[0].assembly.llm.num_live,
            "followed": len(frontend._models[0].assembly.llm._outputs),
            "pooling": len(frontend._models[0].assembly.llm.pooling.outputs),
            "journal": len(dispatch._journal),
            "held": dispatch.num_held,
            "engine": len(self.engine.running),
            "admitted": frontend._models[0].assembly.llm._admission._all.count,
        }


@pytest.fixture(scope="session")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_chat_model(tmp_path_factory.mktemp("models") / "chatml")


@pytest.fixture
async def system(chat_model: Path) -> AsyncIterator[System]:
    async with FakeEngine(vocab_size=byte_level().get_vocab_size(), manual=True) as engine:
        engine.ready.capabilities[:] = ["generate", "embed", "kv_events"]
        async with openai_server(chat_model, engines=[engine.address]) as api:
            yield System(api, engine)


# Ways to send the poisoned request. Each function returns the error that the client got.


async def _generate(system: System) -> str:
    return _internal(await failure(system.frontend.generate(POISON, request_id=POISON, max_tokens=9, logprobs=0)))


async def _vllm(system: System) -> str:
    call = VllmClient(system.frontend).generate(text=POISON, request_id=POISON, max_tokens=9, stream=True)
    return _internal(await failure(call))


async def _embed(system: System) -> str:
    request = pb.EmbedRequest(request_id=POISON, inputs=[pb.PoolingInput(text=POISON)])
    return _internal(await failure(system.frontend.stub.Embed(request, timeout=PATIENCE)))


async def _completion(system: System) -> str:
    body = {"prompt": POISON, "max_tokens": 9, "logprobs": 0}
    response = await system.api.http.post("/v1/completions", json=body, headers={"x-request-id": POISON})
    return _of_http(response.status_code, response.text)


async def _completion_stream(system: System) -> str:
    body = {"prompt": POISON, "max_tokens": 9, "logprobs": 0, "stream": True}
    response = await system.api.http.post("/v1/completions", json=body, headers={"x-request-id": POISON})
    if response.status_code != 200:
        return _of_http(response.status_code, response.text)
    events = [line.removeprefix("data: ") for line in response.text.splitlines() if line]
    assert events[-1] == "[DONE]"
    return _of_http(500, events[-2])


async def _chat(system: System) -> str:
    body = {"messages": [{"role": "user", "content": POISON}], "max_tokens": 9, "logprobs": True}
    response = await system.api.http.post("/v1/chat/completions", json=body, headers={"x-request-id": POISON})
    return _of_http(response.status_code, response.text)


async def _session(system: System) -> str:
    """Send the poisoned request in a session with another request.

    The other request must have the same tokens as when it runs alone.
    """
    call = system.frontend.stub.GenerateSession(timeout=PATIENCE)
    beside = make_request(**NEIGHBOUR, request_id="beside")
    await call.write(pb.GenerateSessionRequest(generate=beside))
    poisoned = make_request(POISON, request_id=POISON, max_tokens=9, logprobs=0)
    await call.write(pb.GenerateSessionRequest(generate=poisoned))
    await call.done_writing()
    messages = await collect(call)
    text = "".join(m.output.text for m in messages if m.output.request_id == "beside")
    assert text == UNDISTURBED
    [error] = [m.error for m in messages if m.HasField("error")]
    assert (error.request_id, error.error.code) == (POISON, "INTERNAL")
    return str(error.error.message)


def _internal(error: RequestFailed) -> str:
    assert (error.code, error.reason) == ("INTERNAL", "INCIDENT"), error
    return error.message


def _of_http(status: int, text: str) -> str:
    error = json.loads(text)["error"]
    assert (status, error["code"]) == (500, "incident"), text
    return str(error["message"])


_SENDERS: dict[str, Callable[[System], Awaitable[str]]] = {
    "generate": _generate,
    "session": _session,
    "vllm": _vllm,
    "embed": _embed,
    "completion": _completion,
    "completion stream": _completion_stream,
    "chat": _chat,
}
_GENERATING = ("generate", "session", "vllm", "completion", "completion stream", "chat")


# Faults to inject.


class Fault(NamedTuple):
    """A fault that a test injects.

    Attributes:
        senders: Names of the ways to send the request.
        inject: Function that makes the request fail. Its arguments are the system and ``monkeypatch``.
    """

    name: str
    senders: tuple[str, ...]
    inject: Callable[[System, pytest.MonkeyPatch], None]


def raising(owner: Any, name: str, when: Callable[..., bool], error: type[Exception] = RuntimeError) -> Any:
    """Make a method or a module's function raise when called with arguments of the poisoned request."""

    def inject(_: System, monkeypatch: pytest.MonkeyPatch) -> None:
        real = getattr(owner, name)

        def broken(*args: Any, **kwargs: Any) -> Any:
            if when(*args, **kwargs):
                raise error("what nobody thought of")
            return real(*args, **kwargs)

        monkeypatch.setattr(owner, name, broken)

    return inject


class PanicException(BaseException):
    """Panic of the tokenizers library. Like the library's own class, it is not a subclass of Exception."""


class Panicking:
    """Tokenizer that panics when it encodes a text of the poisoned request."""

    def __init__(self, library: Any) -> None:
        self._library = library

    def encode(self, text: str, *args: Any, **kwargs: Any) -> Any:
        if is_poison(text):
            raise PanicException("what nobody thought of")
        return self._library.encode(text, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._library, name)


def panicking(system: System, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = system.frontend.frontend._models[0].assembly.llm.tokenizer
    monkeypatch.setattr(tokenizer, "_reader", Panicking(tokenizer._reader))


class PanickingDecoder(Panicking):
    """Decoder that panics when the tokens include ``PANIC_TOKEN``."""

    def decode(self, token_ids: Any, **kwargs: Any) -> Any:
        if PANIC_TOKEN in token_ids:
            raise PanicException("what nobody thought of")
        return self._library.decode(token_ids, **kwargs)


def panicking_at_a_token(system: System, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = system.frontend.frontend._models[0].assembly.llm.tokenizer
    monkeypatch.setattr(tokenizer, "_backend", PanickingDecoder(tokenizer._backend))
    mangled(lambda output: output.new_token_ids.__setitem__(0, PANIC_TOKEN))(system, monkeypatch)


def mangled(change: Callable[[engine_pb.EngineCoreOutput], None]) -> Any:
    """Return an injection that changes the third output of the poisoned request."""

    def inject(system: System, _: pytest.MonkeyPatch) -> None:
        seen = 0

        def mangle(output: engine_pb.EngineCoreOutput) -> engine_pb.EngineCoreOutput:
            nonlocal seen
            if POISON in output.request_id:
                seen += 1
                if seen == 3:
                    change(output)
            return output

        system.engine.mangle = mangle

    return inject


def _wrong_tensor(output: engine_pb.EngineCoreOutput) -> None:
    output.pooling_output.dtype = tensor_pb2.DATA_TYPE_FLOAT32
    output.pooling_output.shape.append(3)
    output.pooling_output.inline = b"1"


def _wrong_logprobs(output: engine_pb.EngineCoreOutput) -> None:
    output.new_logprobs.offsets[:] = [0, 7]


def is_poison(value: Any) -> bool:
    return POISON in str(value)


FAULTS = [
    Fault(
        "decode",
        ("generate", "session"),
        raising(grpc_messages, "generate_request", lambda m, **_: is_poison(m.request_id)),
    ),
    Fault("decode", ("vllm",), raising(vllm_messages, "generate_request", lambda m, **_: is_poison(m.request_id))),
    Fault("decode", ("completion", "completion stream"), raising(Completions, "__call__", lambda *_: True)),
    Fault("decode", ("chat",), raising(ChatCompletions, "__call__", lambda *_: True, RecursionError)),
    Fault(
        "validate", _GENERATING, raising(InputProcessor, "process", lambda _, r, i, *__: is_poison(i), RecursionError)
    ),
    Fault("validate", ("embed",), raising(PoolingInputs, "process", lambda _, r, i, *__: is_poison(i))),
    Fault(
        "check",
        _GENERATING,
        raising(InputProcessor, "check", lambda _, r, *__: is_poison(r.context.external_request_id)),
    ),
    Fault("tokenize", _GENERATING, raising(Tokenizer, "_encode", lambda _, text, *__: is_poison(text))),
    Fault("panic in the tokenizer", _GENERATING, panicking),
    # Gateways detokenize themselves.
    Fault("panic in the detokenizer", tuple(name for name in _GENERATING if name != "vllm"), panicking_at_a_token),
    Fault("template", ("chat",), raising(ChatRenderer, "render", lambda *_: True)),
    Fault(
        "follow",
        _GENERATING,
        raising(OutputProcessor, "add", lambda _, *r: is_poison(r[0].context.external_request_id)),
    ),
    Fault("journal", _GENERATING, raising(Journal, "begin", lambda _, r: is_poison(r[0].context.external_request_id))),
    Fault("send", (*_GENERATING, "embed"), raising(JournalEntry, "to_send", lambda e: is_poison(e.request_id))),
    Fault("write down", _GENERATING, raising(JournalEntry, "take", lambda e, _: is_poison(e.request_id))),
    Fault("read a tensor", _GENERATING, mangled(_wrong_tensor)),
    Fault("read log-probabilities", ("completion", "chat"), mangled(_wrong_logprobs)),
    Fault("process", _GENERATING, raising(OutputProcessor, "_advance", lambda _, s, *__: is_poison(s.external_id))),
    Fault("take a vector", ("embed",), raising(PooledOutputs, "_end", lambda *_: True)),
    Fault("parse", ("chat",), raising(ChatOutputs, "read", lambda *_: True)),
    Fault("answer", ("generate", "session"), raising(grpc_messages, "generate_response", lambda _, i: is_poison(i))),
    Fault("answer", ("vllm",), raising(vllm_messages.GenerateResponses, "of", lambda *_: True)),
    Fault("answer", ("completion", "completion stream"), raising(ChoiceWriter, "write", lambda *_: True)),
]


@pytest.mark.parametrize(
    ("sender", "fault"), [pytest.param(s, f, id=f"{f.name}-{s}") for f in FAULTS for s in f.senders]
)
async def test_an_error_in_a_request_ends_only_that_request(
    system: System, sender: str, fault: Fault, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    sessions = list(system.engine.sessions)
    neighbour = asyncio.create_task(collect(system.frontend.generate(**NEIGHBOUR, request_id="neighbour")))
    await system.engine.until(lambda e: e.running)
    system.engine.step()
    fault.inject(system, monkeypatch)
    with caplog.at_level(logging.ERROR):
        told = await stepping(system, _SENDERS[sender](system), for_all=False)
    number = INCIDENT.search(told)
    assert number is not None, told
    incidents = [record for record in caplog.records if "incident" in vars(record)]
    assert [vars(record)["incident"] for record in incidents] == [number[1]]
    assert POISON in vars(incidents[0])["request"]
    assert incidents[0].exc_info is not None
    assert "what nobody thought of" not in told
    assert sender == "session" or not neighbour.done()
    assert text_of(await stepping(system, neighbour)) == UNDISTURBED
    assert list(system.engine.sessions) == sessions
    await until_nothing_lives(system)


async def test_a_log_or_a_trace_that_fails_costs_a_request_nothing(
    system: System, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    raising(ObservedRequest, "end", lambda *_, **__: True)(system, monkeypatch)
    with caplog.at_level(logging.ERROR):
        outputs = await stepping(system, collect(system.frontend.generate(POISON, max_tokens=3)))
    assert outputs[-1].finish_reason == finish_pb2.FINISH_REASON_LENGTH
    assert len(incidents_of(caplog)) == 1
    await until_nothing_lives(system)


async def test_a_request_that_is_not_observed_is_not_counted(
    system: System, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    raising(RequestObserver, "accepted", lambda *_: True)(system, monkeypatch)
    with caplog.at_level(logging.ERROR):
        await _generate(system)
    assert len(incidents_of(caplog)) == 1
    await until_nothing_lives(system)


@pytest.mark.parametrize("what", ["steps", "calls", "change"])
async def test_metrics_that_fail_end_nothing(
    system: System, what: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    owner, name = {
        "steps": (EngineMetrics, "step"),
        "calls": (CallTelemetry, "started"),
        "change": (FrontendMetrics, "series"),
    }[what]
    sessions = list(system.engine.sessions)
    raising(owner, name, lambda *args: name != "series" or args[1] == "penstock:requests_held")(system, monkeypatch)
    with caplog.at_level(logging.ERROR):
        outputs = await stepping(system, collect(system.frontend.generate(POISON, max_tokens=3)))
        system.engine.drain()
        await until_draining(system)
    assert outputs[-1].finish_reason == finish_pb2.FINISH_REASON_LENGTH
    assert incidents_of(caplog)
    assert list(system.engine.sessions) == sessions


async def test_cache_events_that_cannot_be_told_end_no_session(
    system: System, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    raising(KvEventFeed, "publish", lambda *_: True)(system, monkeypatch)
    neighbour = asyncio.create_task(collect(system.frontend.generate(**NEIGHBOUR, request_id="neighbour")))
    await system.engine.until(lambda e: e.running)
    event = events_pb2.KvCacheEvent(all_blocks_cleared=events_pb2.AllBlocksCleared())
    with caplog.at_level(logging.ERROR):
        system.engine.sessions[0].send(outputs=engine_pb.EngineCoreOutputs(kv_events=[event]))
        assert text_of(await stepping(system, neighbour)) == UNDISTURBED
    assert len(incidents_of(caplog)) == 1


@pytest.mark.parametrize("what", ["statistics", "result of a utility"])
async def test_what_cannot_be_read_beside_the_outputs_of_a_frame_ends_none_of_them(
    system: System, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    neighbour = asyncio.create_task(collect(system.frontend.generate(**NEIGHBOUR, request_id="neighbour")))
    await system.engine.until(lambda e: e.running)
    [session] = system.engine.sessions
    with caplog.at_level(logging.ERROR):
        if what == "statistics":
            wrong = stats_pb2.SchedulerStats(kv_cache_usage=7.0)
            session.send(outputs=engine_pb.EngineCoreOutputs(scheduler_stats=wrong))
        else:
            system.engine.utilities.clear()
            calls = system.engine.utility_calls
            system.engine.on_utility = lambda _: session.send(
                outputs=engine_pb.EngineCoreOutputs(
                    utility_output=engine_pb.UtilityOutput(call_id=len(calls), result=b"\xc1")
                )
            )
            results = await system.frontend.frontend._models[0].assembly.engines.call_utility("engine_info")
            [error] = results.values()
            assert (error.code, error.reason) == ("INTERNAL", "INCIDENT")
        assert text_of(await stepping(system, neighbour)) == UNDISTURBED
    assert len(incidents_of(caplog)) == 1
    assert list(system.engine.sessions) == [session]


async def test_a_message_of_a_session_that_cannot_be_read_ends_no_request_of_it(system: System) -> None:
    raw = system.frontend.channel.stream_stream(
        "/penstock.inference.v1.InferenceService/GenerateSession",
        response_deserializer=pb.GenerateSessionResponse.FromString,
    )(timeout=PATIENCE)
    beside = make_request(**NEIGHBOUR, request_id="beside")
    await raw.write(pb.GenerateSessionRequest(generate=beside).SerializeToString())
    await raw.write(b"\xff\xff\xff")
    await raw.done_writing()
    messages = await stepping(system, collect(raw))
    assert "".join(m.output.text for m in messages if m.output.request_id == "beside") == UNDISTURBED
    [error] = [m.error for m in messages if m.HasField("error")]
    assert (error.request_id, error.error.reason) == ("", "UNREADABLE_MESSAGE")


async def until_draining(system: System) -> None:
    async with asyncio.timeout(PATIENCE):
        while system.frontend.frontend._models[0].assembly.engines.view.num_engines:
            await asyncio.sleep(0.005)


def incidents_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [vars(record)["incident"] for record in caplog.records if "incident" in vars(record)]


async def stepping(system: System, work: Awaitable[Any], *, for_all: bool = True) -> Any:
    """Await ``work`` while the engine steps.

    If ``for_all`` is false, the engine steps only while it has requests other than the neighbour.
    """
    task = asyncio.ensure_future(work)
    while not task.done():
        labels = {request.message.external_request_id for request in system.engine.running.values()}
        if labels and (for_all or labels != {"neighbour"}):
            system.engine.step()
        await asyncio.sleep(0)
    return task.result()


async def until_nothing_lives(system: System) -> None:
    async with asyncio.timeout(PATIENCE):
        while any(system.live().values()):
            await asyncio.sleep(0.005)


def text_of(outputs: list[pb.GenerateResponse]) -> str:
    return "".join(output.text for output in outputs)
