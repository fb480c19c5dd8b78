"""Admission on every API of a frontend: requests over a limit, past their deadline, or of a tenant at its limit."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import httpx
import msgspec
import pytest
from google.rpc import error_details_pb2, status_pb2
from smg_grpc_proto.generated import vllm_engine_pb2, vllm_engine_pb2_grpc

from penstock.inference.v1 import messages_pb2 as pb
from penstock_common.errors import DeadlineExceeded, ResourceExhausted
from penstock_common.rpc.status import DETAILS_KEY
from penstock_common.types.request import PoolingParams, PoolingTask, RequestContext
from penstock_frontend.call_types import ChatMessage, ChatRequest, GenerateRequest, PoolingRequest
from penstock_frontend.config import FairnessConfig, LimitsConfig
from tests.fakes.engines.fake_engine import FakeEngine
from tests.fakes.frontends.frontend_server import FrontendServer, collect, eventually, failure, make_request
from tests.fakes.frontends.openai_server import OpenAIServer, openai_server
from tests.fakes.models.chat_templates import save_chat_model
from tests.fakes.models.small_tokenizers import byte_level
from tests.fakes.patience import PATIENCE

VOCAB = byte_level().get_vocab_size()
METADATA = (("x-penstock-tenant", "t"),)
HEADERS = {"x-penstock-tenant": "t", "x-request-timeout": f"{PATIENCE:g}"}
RUNNING = "12345"
"""Prompt of the request that is running before a test sends its own requests."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_chat_model(tmp_path_factory.mktemp("models") / "chatml")


@pytest.fixture
async def engine() -> AsyncIterator[FakeEngine]:
    """Yield an engine that accepts every request and computes nothing."""
    engine = FakeEngine(vocab_size=VOCAB, max_model_len=2048, manual=True)
    engine.ready.capabilities[:] = ["generate", "embed"]
    async with engine:
        yield engine


class Refusal(NamedTuple):
    """A refusal that a client received: the status, and the seconds to wait before a retry."""

    code: str
    retry_after: float | None


async def rpc(call: Any) -> Refusal:
    error = await failure(call)
    return Refusal(error.code, error.retry_after)


async def post(server: OpenAIServer, path: str, **body: Any) -> Refusal:
    response: httpx.Response = await server.http.post(path, json=body, headers=HEADERS)
    assert response.json()["error"]["code"] == "rate_limit_exceeded"
    codes = {429: "RESOURCE_EXHAUSTED"}
    return Refusal(codes[response.status_code], float(response.headers["retry-after"]))


async def generate(server: OpenAIServer) -> Refusal:
    return await rpc(server.server.stub.Generate(make_request("hello"), timeout=PATIENCE, metadata=METADATA))


async def session(server: OpenAIServer) -> Refusal:
    async def requests() -> AsyncIterator[pb.GenerateSessionRequest]:
        yield pb.GenerateSessionRequest(generate=make_request("hello", request_id="of the session"))

    call = server.server.stub.GenerateSession(requests(), timeout=PATIENCE, metadata=METADATA)
    [message] = await collect(call)
    return Refusal(message.error.error.code, message.error.error.retry_after)


async def chat(server: OpenAIServer) -> Refusal:
    request = pb.ChatRequest(messages=[pb.ChatMessage(role="user", content="hello")])
    return await rpc(server.server.stub.Chat(request, timeout=PATIENCE, metadata=METADATA))


async def embed(server: OpenAIServer) -> Refusal:
    request = pb.EmbedRequest(inputs=[pb.PoolingInput(text="hello")])
    return await rpc(server.server.stub.Embed(request, timeout=PATIENCE, metadata=METADATA))


async def facade(server: OpenAIServer) -> Refusal:
    stub: Any = vllm_engine_pb2_grpc.VllmEngineStub(server.server.channel)
    request = vllm_engine_pb2.GenerateRequest(request_id="of the facade", text="hello")
    request.sampling_params.max_tokens = 3
    return await rpc(stub.Generate(request, timeout=PATIENCE, metadata=METADATA))


async def facade_embed(server: OpenAIServer) -> Refusal:
    stub: Any = vllm_engine_pb2_grpc.VllmEngineStub(server.server.channel)
    request = vllm_engine_pb2.EmbedRequest(request_id="of the facade")
    request.tokenized.input_ids.extend([1, 2, 3])
    return await rpc(stub.Embed(request, timeout=PATIENCE, metadata=METADATA))


async def completions(server: OpenAIServer) -> Refusal:
    return await post(server, "/v1/completions", prompt=["he", "llo"], logprobs=1)


async def streamed_completions(server: OpenAIServer) -> Refusal:
    return await post(server, "/v1/completions", prompt="hello", stream=True)


async def chat_completions(server: OpenAIServer) -> Refusal:
    messages = [{"role": "user", "content": "hello"}]
    return await post(server, "/v1/chat/completions", messages=messages, return_token_ids=True)


async def embeddings(server: OpenAIServer) -> Refusal:
    return await post(server, "/v1/embeddings", input="hello")


Way = Callable[[OpenAIServer], Awaitable[Refusal]]
WAYS: list[Way] = [
    generate,
    session,
    chat,
    embed,
    facade,
    facade_embed,
    completions,
    streamed_completions,
    chat_completions,
    embeddings,
]


class Spy:
    """Counts tokenized texts and rendered conversations."""

    def __init__(self, server: FrontendServer, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        tokenizer = server.frontend._models[0].assembly.llm.tokenizer
        for name in ("encode", "encode_all", "encode_pairs", "in_thread"):
            monkeypatch.setattr(tokenizer, name, self._counted(getattr(tokenizer, name)))

    def _counted(self, method: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        async def counted(*arguments: Any, **options: Any) -> Any:
            self.count += 1
            return await method(*arguments, **options)

        return counted


@pytest.mark.parametrize(
    "limits", [{"max_requests": 1}, {"max_prompt_length_in_flight": 7}, {"max_tenant_requests": 1}], ids=str
)
async def test_every_way_in_is_bounded_and_refuses_before_anything_is_tokenized(
    engine: FakeEngine, model: Path, monkeypatch: pytest.MonkeyPatch, limits: dict[str, int]
) -> None:
    async with openai_server(model, engines=[engine.address], limits=LimitsConfig(**limits)) as server:
        running = server.server.stub.Generate(make_request(RUNNING), timeout=PATIENCE, metadata=METADATA)
        await engine.until(lambda e: e.running)
        spy = Spy(server.server, monkeypatch)
        refused = {way.__name__: await way(server) for way in WAYS}
        assert refused == {way.__name__: Refusal("RESOURCE_EXHAUSTED", 1.0) for way in WAYS}
        assert spy.count == 0
        assert len(engine.requests) == 1
        assert server.num_live == 1
        running.cancel()
        await eventually(lambda: server.num_live == 0)
        again = asyncio.create_task(server.http.post("/v1/completions", json={"prompt": "x"}, headers=HEADERS))
        await engine.until(lambda e: len(e.requests) == 2)
        again.cancel()
        reason = "TENANT_QUOTA" if "max_tenant_requests" in limits else "QUEUE_FULL"
        metrics = (await server.http.get("/metrics")).text
        assert f'penstock:requests_refused_total{{model_name="model",reason="{reason}"}} {len(WAYS)}.0' in metrics


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
async def test_tenant_weight_and_deadline_reach_the_engine_by_every_way(
    engine: FakeEngine, model: Path, way: Way
) -> None:
    fairness = FairnessConfig(weights={"t": 2.5})
    async with openai_server(model, engines=[engine.address], fairness=fairness) as server:
        began = time.time()
        call = asyncio.create_task(way(server))  # type: ignore[arg-type]  # they are coroutines
        await engine.until(lambda e: e.running)
        request = engine.requests[0]
        assert (request.tenant, request.tenant_weight) == ("t", 2.5)
        assert began < request.deadline < time.time() + PATIENCE + 1
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)


async def test_another_weight_and_other_limits_hold_for_the_requests_that_come_next(
    engine: FakeEngine, model: Path
) -> None:
    options = {"limits": LimitsConfig(max_requests=1), "fairness": FairnessConfig(default_weight=0.5)}
    async with openai_server(model, engines=[engine.address], **options) as server:
        calls = [asyncio.create_task(chat(server))]
        await engine.until(lambda e: len(e.running) == 1)
        assert {way.__name__: (await way(server)).code for way in WAYS} == {
            way.__name__: "RESOURCE_EXHAUSTED" for way in WAYS
        }
        config = msgspec.structs.replace(
            server.server.config, limits=LimitsConfig(max_requests=3), fairness=FairnessConfig(default_weight=2.5)
        )
        server.server.frontend.apply(config)
        calls += [asyncio.create_task(way(server)) for way in (generate, chat_completions)]
        await engine.until(lambda e: len(e.running) == 3)
        assert sorted(request.tenant_weight for request in engine.requests) == [0.5, 2.5, 2.5]
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)


async def test_a_tenant_at_its_limit_is_named_in_a_quota_failure_and_others_are_served(
    engine: FakeEngine, model: Path
) -> None:
    limits = LimitsConfig(max_tenant_requests=1)
    async with FrontendServer(model, engines=[engine.address], limits=limits) as frontend:
        running = [frontend.stub.Generate(make_request(), timeout=PATIENCE, metadata=METADATA)]
        await engine.until(lambda e: len(e.running) == 1)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            [message async for message in frontend.stub.Generate(make_request(), metadata=METADATA)]
        details = dict(refused.value.trailing_metadata() or ())[DETAILS_KEY]
        quota = error_details_pb2.QuotaFailure()
        assert any(detail.Unpack(quota) for detail in status_pb2.Status.FromString(details).details)
        assert [violation.subject for violation in quota.violations] == ["tenant:t"]
        running.append(frontend.generate())
        running.append(frontend.generate(routing=pb.RoutingHints(tenant="u")))
        await engine.until(lambda e: len(e.running) == 3)
        error = await failure(frontend.generate())
        assert isinstance(error, ResourceExhausted)
        assert error.quota_subject == "tenant:"
        for call in running:
            call.cancel()


@pytest.mark.parametrize("limit", ["limits.max_requests", "http.max_requests"])
async def test_a_flooding_tenant_is_refused_and_another_one_is_served_every_time(
    engine: FakeEngine, model: Path, limit: str
) -> None:
    """Lets tenant a send 50 times its limit of requests at once, while tenant b sends 20 requests one by one."""
    options: dict[str, Any] = (
        {"limits": LimitsConfig(max_requests=4)} if limit == "limits.max_requests" else {"http": {"max_requests": 4}}
    )
    async with openai_server(model, engines=[engine.address], **options) as server:

        def post(tenant: str, max_tokens: int) -> Awaitable[httpx.Response]:
            body = {"prompt": "x", "max_tokens": max_tokens, "ignore_eos": True}
            return server.http.post("/v1/completions", json=body, headers={"x-penstock-tenant": tenant})

        flood = [asyncio.ensure_future(post("a", 1000)) for _ in range(4)]
        await engine.until(lambda e: len(e.running) == 4)
        served, refused = [], []
        for _ in range(20):
            refused += [(await post("a", 1)).status_code for _ in range(10)]
            mine = asyncio.ensure_future(post("b", 1))
            await asyncio.wait(
                [mine, asyncio.ensure_future(engine.until(lambda e: len(e.running) == 5))],
                return_when=asyncio.FIRST_COMPLETED,
            )
            engine.step()
            served.append((await mine).status_code)
        assert served == [200] * 20
        assert refused == [429] * 200
        assert not any(task.done() for task in flood), "nothing that runs is given up"
        for task in flood:
            task.cancel()
        await asyncio.gather(*flood, return_exceptions=True)


async def test_waiting_requests_of_one_tenant_leave_room_for_another_tenant(model: Path) -> None:
    async with FrontendServer(model, engines=["127.0.0.1:1"], max_held_requests=2) as frontend:
        engines = frontend.frontend._models[0].assembly.engines
        waiting = []
        for tenant in ("a", "a", "b"):
            routing = pb.RoutingHints(tenant=tenant)
            waiting.append(asyncio.create_task(collect(frontend.generate(routing=routing))))
            await eventually(lambda: engines.num_held == len(waiting))
        error = await failure(frontend.generate(routing=pb.RoutingHints(tenant="a")))
        assert error.message == "3 requests wait for an engine; the limit max_held_requests is 2"
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


async def test_a_request_that_comes_too_late_is_not_even_tokenized(
    engine: FakeEngine, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    late: dict[str, Any] = {"context": RequestContext(deadline=time.time() - 1)}
    generates = GenerateRequest(prompt="hello", **late)
    converses = ChatRequest(messages=[ChatMessage(role="user", content="hello")], **late)
    embeds = PoolingRequest(inputs=["hello"], fields=["f"], params=PoolingParams(task=PoolingTask.EMBED), **late)
    async with FrontendServer(model, engines=[engine.address]) as frontend:
        await frontend.until_health(serving=True)
        spy = Spy(frontend, monkeypatch)
        llm, chats = frontend.frontend._models[0].assembly.llm, frontend.frontend._models[0].assembly.chat
        lives = [llm.accept("a"), llm.accept("b")]
        for outputs in (llm.generate(generates, lives[0]), chats.run(converses, lives[1])):
            with pytest.raises(DeadlineExceeded, match="before the request started"):
                await anext(outputs)
        for live in lives:
            llm.release(live)
        with pytest.raises(DeadlineExceeded, match="before the request started"):
            await llm.run_pooling(embeds)
        assert spy.count == 0
        assert not engine.requests
