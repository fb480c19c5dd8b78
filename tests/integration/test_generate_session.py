"""GenerateSession over gRPC: many requests on one stream. Each request ends separately."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, ClassVar

import grpc
import pytest
from structlog.testing import capture_logs

from penstock.common.v1 import finish_pb2
from penstock.inference.v1 import messages_pb2 as pb
from penstock_common.config.sections import LogConfig
from penstock_frontend.config import LimitsConfig
from penstock_frontend.tenants import Refused
from tests.fakes.engines.fake_engine import FakeEngine
from tests.fakes.frontends.frontend_server import FrontendServer, eventually, make_request

Output = pb.GenerateResponse | pb.SessionError


class Client:
    """A session and its ``outputs``.

    ``open`` lists sessions to cancel, because open sessions delay the server's stop.
    """

    open: ClassVar[list[Any]] = []

    def __init__(self, frontend: FrontendServer, **options: Any) -> None:
        self.call = frontend.stub.GenerateSession(**({"timeout": 20.0} | options))
        self.open.append(self.call)
        self.outputs: list[Output] = []

    async def generate(self, request_id: str, **fields: Any) -> None:
        await self.send(generate=make_request(request_id=request_id, **fields))

    async def send(self, **message: Any) -> None:
        await self.call.write(pb.GenerateSessionRequest(**message))

    async def next(self) -> Output:
        message = await self.call.read()
        assert message is not grpc.aio.EOF, "the session ended"
        output: Output = getattr(message, message.WhichOneof("message"))
        self.outputs.append(output)
        return output

    async def last(self, request_id: str) -> Output:
        """Read until a request ends, and return its last output."""
        while True:
            output = await self.next()
            if output.request_id == request_id and (isinstance(output, pb.SessionError) or output.finish_reason):
                return output

    async def rest(self) -> list[Output]:
        """Half-close the session, and read until the session ends."""
        await self.call.done_writing()
        while (message := await self.call.read()) is not grpc.aio.EOF:
            self.outputs.append(getattr(message, message.WhichOneof("message")))
        return self.outputs

    def tokens(self, request_id: str, index: int = 0) -> list[int]:
        return [
            token
            for output in self.outputs
            if isinstance(output, pb.GenerateResponse) and (output.request_id, output.index) == (request_id, index)
            for token in output.token_ids
        ]


def error(output: Output) -> finish_pb2.RequestError:
    assert isinstance(output, pb.SessionError), output
    return output.error


def finish(output: Output) -> str:
    assert isinstance(output, pb.GenerateResponse), output
    return finish_pb2.FinishReason.Name(output.finish_reason).removeprefix("FINISH_REASON_")


@pytest.fixture
async def stepped(manual: FakeEngine, model: Path) -> AsyncIterator[FrontendServer]:
    """Yield a frontend in front of ``manual``."""
    limits = LimitsConfig(max_session_requests=3)
    log = LogConfig(requests=True)
    async with FrontendServer(model, engines=[manual.address], limits=limits, log=log) as frontend:
        await frontend.until_health(serving=True)
        yield frontend
        while Client.open:
            Client.open.pop().cancel()


async def test_requests_of_a_session_are_what_they_are_alone(frontend: FrontendServer) -> None:
    session = Client(frontend)
    for index in range(5):
        await session.generate(f"r{index}", seed=index, max_tokens=5 + index)
    await session.rest()
    for index in range(5):
        alone = await frontend.outputs(seed=index, max_tokens=5 + index)
        assert session.tokens(f"r{index}") == [token for output in alone for token in output.token_ids]
    assert await session.call.code() is grpc.StatusCode.OK


async def test_sequences_of_a_request_come_by_their_index(frontend: FrontendServer) -> None:
    session = Client(frontend)
    await session.generate("r", seed=1, max_tokens=4, n=2)
    await session.rest()
    assert [finish(o) for o in session.outputs if isinstance(o, pb.GenerateResponse) and o.finish_reason] == [
        "LENGTH"
    ] * 2
    assert len(session.tokens("r", 0)) == len(session.tokens("r", 1)) == 4


async def test_an_id_is_free_when_its_last_output_is_read(frontend: FrontendServer) -> None:
    session = Client(frontend)
    for _ in range(3):
        await session.generate("again", max_tokens=2)
        assert finish(await session.last("again")) == "LENGTH"
    await session.rest()


async def test_ids_are_those_of_a_session(stepped: FrontendServer, manual: FakeEngine) -> None:
    first, second = Client(stepped), Client(stepped)
    for session in (first, second):
        await session.generate("a", max_tokens=1)
    await manual.until(lambda e: len(e.running) == 2)
    await first.generate("a")
    assert error(await first.next()).reason == "DUPLICATE_REQUEST_ID"
    await first.send(abort_request_id="a")
    assert finish(await first.last("a")) == "ABORT"
    await manual.until(lambda e: len(e.running) == 1)
    manual.step()
    assert finish(await second.last("a")) == "LENGTH"


async def test_an_aborted_request_ends_with_a_last_output(stepped: FrontendServer, manual: FakeEngine) -> None:
    manual.script = lambda request: [5] * 9  # a complete character, because the frontend delays incomplete characters
    session = Client(stepped)
    await session.generate("a", n=2)
    await session.generate("b", max_tokens=2)
    await manual.until(lambda e: len(e.running) == 3)
    manual.step()
    await session.next()
    await session.send(abort_request_id="a")
    ends = [await session.last("a"), await session.last("a")]
    assert [finish(end) for end in ends] == ["ABORT", "ABORT"]
    assert [end.usage.completion_tokens for end in ends if isinstance(end, pb.GenerateResponse)] == [1, 1]
    await manual.until(lambda e: len(e.aborted) == 2)
    manual.step()
    assert finish(await session.last("b")) == "LENGTH"
    assert len(session.tokens("a", 0)) == len(session.tokens("a", 1)) == 1


async def test_withheld_text_comes_with_the_last_output(stepped: FrontendServer, manual: FakeEngine) -> None:
    manual.script = lambda request: [5, 6, 7, 8]
    session = Client(stepped)
    first = (await stepped.stub.Detokenize(pb.DetokenizeRequest(token_ids=[5]))).text
    await session.generate("a", stop=[first + "never"])
    await manual.until(lambda e: e.running)
    manual.step()
    await eventually(
        lambda: [s for s in stepped.frontend._models[0].assembly.llm._live.copy().pop().states if s.num_received]
    )
    await session.send(abort_request_id="a")
    end = await session.last("a")
    assert isinstance(end, pb.GenerateResponse)
    assert (end.text, list(end.token_ids), finish(end)) == (first, [5], "ABORT")


async def test_a_request_that_waits_for_an_engine_can_be_aborted(model: Path) -> None:
    async with FrontendServer(model, engines=["127.0.0.1:1"]) as frontend:
        session = Client(frontend)
        await session.generate("a")
        await session.send(abort_request_id="a")
        end = await session.next()
        assert (finish(end), end.request_id) == ("ABORT", "a")
        await session.generate("a")  # the id can be used again
        await session.send(abort_request_id="a")
        assert finish(await session.next()) == "ABORT"
        assert len(await session.rest()) == 2


async def test_aborting_what_does_not_run_changes_nothing(frontend: FrontendServer) -> None:
    session = Client(frontend)
    await session.send(abort_request_id="nobody")
    await session.generate("r", max_tokens=2)
    assert finish(await session.last("r")) == "LENGTH"
    assert await session.rest() == session.outputs


@pytest.mark.parametrize(
    ("message", "code", "field"),
    [
        ({}, "INVALID_ARGUMENT", "message"),
        ({"generate": make_request()}, "INVALID_ARGUMENT", "request_id"),
        ({"generate": make_request(request_id="x", top_p=2)}, "INVALID_ARGUMENT", "sampling_params.top_p"),
        ({"generate": make_request(request_id="x", output_kind=9)}, "INVALID_ARGUMENT", "sampling_params.output_kind"),
        ({"generate": make_request(request_id="x" * 300)}, "INVALID_ARGUMENT", "request_id"),
        ({"generate": make_request(request_id="x", model="other")}, "NOT_FOUND", "model"),
        ({"generate": make_request(request_id="x", lora="a")}, "UNIMPLEMENTED", "lora"),
        ({"generate": make_request(request_id="running")}, "INVALID_ARGUMENT", "request_id"),
    ],
)
async def test_a_request_that_fails_leaves_the_others_alone(
    stepped: FrontendServer, manual: FakeEngine, message: dict[str, Any], code: str, field: str
) -> None:
    session = Client(stepped)
    await session.generate("running", max_tokens=1)
    await manual.until(lambda e: e.running)
    await session.send(**message)
    output = await session.next()
    assert (error(output).code, error(output).field) == (code, field)
    assert output.request_id == message.get("generate", pb.GenerateRequest()).request_id
    manual.step()
    assert finish(await session.last("running")) == "LENGTH"


async def test_a_session_has_a_limit_of_requests(stepped: FrontendServer, manual: FakeEngine) -> None:
    session = Client(stepped)
    with capture_logs() as lines:
        for index in range(4):
            await session.generate(f"r{index}", max_tokens=1, routing=pb.RoutingHints(tenant=f"t{index}"))
        refused = await session.last("r3")
    [line] = [line for line in lines if line["event"] == "request refused"]
    assert (line["request"], line["tenant"], line["code"]) == ("r3", "t3", "RESOURCE_EXHAUSTED")
    assert stepped.frontend._models[0].assembly.llm.tenants.recent() == [Refused("t3", "QUEUE_FULL", 1)]
    assert error(refused).code == "RESOURCE_EXHAUSTED"
    assert error(refused).retry_after > 0
    assert "limits.max_session_requests is 3" in error(refused).message
    await manual.until(lambda e: len(e.running) == 3)
    manual.step()
    assert len(await session.rest()) == 4


async def test_requests_that_find_no_engine_any_more_fail_and_the_session_goes_on(model: Path) -> None:
    options = {"engine_wait_timeout": 0.1}
    async with FakeEngine(manual=True) as first, FrontendServer(model, engines=[first.address], **options) as frontend:
        await frontend.until_health(serving=True)
        session = Client(frontend)
        await session.generate("r")
        await first.until(lambda e: e.running)
        await first.kill()
        assert error(await session.last("r")).code == "UNAVAILABLE"
        assert len(await session.rest()) == 1


async def test_half_closing_lets_requests_finish(stepped: FrontendServer, manual: FakeEngine) -> None:
    session = Client(stepped)
    await session.generate("r", max_tokens=3)
    await manual.until(lambda e: e.running)
    await session.call.done_writing()
    for _ in range(3):
        manual.step()
    assert finish(await session.last("r")) == "LENGTH"
    assert await session.call.read() is grpc.aio.EOF


async def test_cancelling_a_session_ends_all_its_requests(stepped: FrontendServer, manual: FakeEngine) -> None:
    session = Client(stepped)
    for index in range(3):
        await session.generate(f"r{index}")
    await manual.until(lambda e: len(e.running) == 3)
    session.call.cancel()
    await manual.until(lambda e: len(e.aborted) == 3)
    await eventually(lambda: not stepped.frontend._models[0].assembly.llm._live)


async def test_a_cancelled_session_leaves_none_of_its_tasks(stepped: FrontendServer, manual: FakeEngine) -> None:
    session = Client(stepped)
    await session.generate("r")
    await manual.until(lambda e: e.running)
    session.call.cancel()
    await eventually(lambda: not [task for task in asyncio.all_tasks() if task.get_name() == "generate session"])


async def test_the_calls_deadline_is_that_of_each_request(stepped: FrontendServer, manual: FakeEngine) -> None:
    session = Client(stepped, timeout=15.0)
    await session.generate("r")
    await manual.until(lambda e: e.running)
    assert manual.requests[0].HasField("deadline")


async def test_the_sessions_metadata_goes_for_each_request(stepped: FrontendServer, manual: FakeEngine) -> None:
    session = Client(stepped, metadata=(("x-penstock-priority", "5"), ("x-penstock-tenant", "t")))
    await session.generate("r")
    await session.generate("s", routing=pb.RoutingHints(priority=1))
    await manual.until(lambda e: len(e.running) == 2)
    assert {request.external_request_id: request.priority for request in manual.requests} == {"r": 5, "s": 1}


async def test_a_client_that_does_not_read_gets_everything_later_in_fewer_messages(
    frontend: FrontendServer, engine: FakeEngine
) -> None:
    engine.ready.max_model_len = 100_000
    session = Client(frontend)
    count = 1500
    for index in range(2):
        await session.generate(f"r{index}", seed=index, max_tokens=count, logprobs=100)
    await engine.until(lambda e: e.requests and not e.running)
    await session.rest()
    for index in range(2):
        assert len(session.tokens(f"r{index}")) == count
    assert len(session.outputs) < 2 * count


async def test_a_draining_frontend_serves_new_requests_of_a_session(
    stepped: FrontendServer, manual: FakeEngine
) -> None:
    session = Client(stepped)
    await session.generate("old", max_tokens=1)
    await manual.until(lambda e: e.running)
    stepped.frontend.stop()
    await eventually(lambda: not stepped.frontend._readiness.ready)
    await session.generate("new", max_tokens=1)
    await manual.until(lambda e: len(e.running) == 2)
    manual.step()
    assert [finish(await session.last(name)) for name in ("old", "new")] == ["LENGTH", "LENGTH"]
