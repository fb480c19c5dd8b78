"""Gateways that use one server for prefill and another one for decode, with real processes.

The tests send the requests of SMG's prefill-decode mode and of llm-d's sidecar. Answers equal those of one server. The
second server computes at most one block of the prompt.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from penstock_common.rpc.channel import make_channel
from tests.e2e.conftest import DEMO_MODEL
from tests.fakes.clients.llm_d import PREFILL_PARAMS
from tests.fakes.clients.smg import MISSING, SMG, gateway, post, written
from tests.fakes.patience import PATIENCE
from tests.fakes.processes import KEPT, Service
from tests.fakes.systems.rank_group import metric
from tests.fuzz.params import Campaign

NAME = "penstock-tiny"
BLOCK = 16
TOKENS = 24
TEXT = "once upon a time there was a little girl who had a red ball and a big dog and went to the park. "

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]


class Server:
    """An engine with a role, and its frontend with gRPC and HTTP ports."""

    def __init__(self, role: str) -> None:
        self.engine = Service(
            "penstock_enginecore",
            metrics_flag="metrics.port",
            model__path=DEMO_MODEL,
            engine_id=role,
            role=role,
            cache__kv_cache_memory="64MiB",
            cache__block_size=BLOCK,
            executor__num_threads=1,
            kv_transfer__transport="grpc",
            kv_transfer__port=0,
            kv_transfer__advertise="127.0.0.1",
        )
        self.frontend = Service(
            "penstock_frontend",
            metrics_flag="http.port",
            http__host="127.0.0.1",
            model__path=DEMO_MODEL,
            engines=json.dumps([self.engine.address]),
            admin__port=0,
            disaggregation__gateway="true",
            disaggregation__allowed_addresses='["127.0.0.1"]',
            **KEPT,
        )

    @asynccontextmanager
    async def started(self) -> AsyncIterator["Server"]:
        async with self.engine, self.frontend:
            await self.engine.serving()
            await self.frontend.serving()
            url = f"http://127.0.0.1:{self.frontend.metrics_port}"
            async with httpx.AsyncClient(base_url=url, timeout=PATIENCE) as self.http:
                yield self

    @property
    def num_computed(self) -> int:
        """Return the number of computed tokens in all steps so far."""
        return round(metric(self.engine, "vllm:iteration_tokens_total_sum"))

    @property
    def num_brought(self) -> int:
        """Return the number of cached tokens that other engines have sent."""
        return round(metric(self.engine, "vllm:external_prefix_cache_hits_total"))


class Servers:
    """Two servers: ``first`` computes prompts, and ``second`` computes outputs."""

    def __init__(self, first: Server, second: Server) -> None:
        self.first = first
        self.second = second
        self._counted = (0, 0, 0)

    def count(self) -> tuple[int, int, int]:
        """Return numbers of tokens since the last call.

        The numbers are the tokens that the first server computed, the tokens that the second server computed, and the
        tokens that the second server received from the first one.
        """
        now = (self.first.num_computed, self.second.num_computed, self.second.num_brought)
        before, self._counted = self._counted, now
        return now[0] - before[0], now[1] - before[1], now[2] - before[2]

    def assert_legs(self, prompt: int, output: int) -> None:
        """Check that the first server has computed the entire prompt, and the second server at most one block of it."""
        first, second, brought = self.count()
        assert first == prompt
        computed = second - (output - 1)  # the last output token is never an input of a step
        assert 1 <= computed <= BLOCK
        assert brought == prompt - computed

    async def assert_one_servers(
        self, path: str, body: dict[str, Any], answer: dict[str, Any], client: httpx.AsyncClient | None = None
    ) -> None:
        """Check that one server alone gives the same answer.

        Args:
            client: Client of a gateway in front of the server. If None, the request goes to the first server directly.
        """
        alone = await post(client or self.first.http, path, body)
        assert said(alone) == said(answer)
        self.count()


def said(answer: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the texts of an answer with their finish reasons."""
    if "output" in answer:
        return [(part["text"], answer["status"]) for item in answer["output"] for part in item["content"]]
    texts = [c["text"] if "text" in c else c["message"]["content"] for c in answer["choices"]]
    return [(text, c["finish_reason"]) for text, c in zip(texts, answer["choices"], strict=True)]


async def events_of(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the events of a stream."""
    async with client.stream("POST", path, json=body) as response:
        assert response.is_success, await response.aread()
        lines = [line.removeprefix("data: ") async for line in response.aiter_lines() if line.startswith("data: ")]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def servers() -> AsyncIterator[Servers]:
    async with AsyncExitStack() as stack:
        entering = [stack.enter_async_context(Server(role).started()) for role in ("prefill", "decode")]
        first, second = await asyncio.gather(*entering)
        yield Servers(first, second)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the path of SMG's log."""
    return tmp_path_factory.mktemp("gateway") / "log"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def smg(servers: Servers, log: Path) -> AsyncIterator[httpx.AsyncClient]:
    """Yield a client of SMG, which sends prefill and decode to different servers."""
    if SMG is None:
        pytest.skip(MISSING)
    first, second = servers.first.frontend.address, servers.second.frontend.address
    async with gateway(first, DEMO_MODEL, NAME, log, "--log-level", "debug", decode=second) as client:
        servers.count()
        yield client


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def plain_smg(servers: Servers, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[httpx.AsyncClient]:
    """Yield a client of SMG in front of one server.

    SMG derives other sampling parameters from the same fields than Penstock's HTTP server does.
    """
    if SMG is None:
        pytest.skip(MISSING)
    log = tmp_path_factory.mktemp("plain") / "log"
    async with gateway(servers.first.frontend.address, DEMO_MODEL, NAME, log) as client:
        yield client


def completion(beginning: str, **more: Any) -> tuple[str, dict[str, Any]]:
    """Return the path and the body of a completion.

    Every test uses a different ``beginning``, because a common prefix would be cached.
    """
    body = {"model": NAME, "prompt": beginning + TEXT * 5, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    return "/v1/completions", {**body, **more}


def chat(beginning: str, **more: Any) -> tuple[str, dict[str, Any]]:
    messages = [{"role": "user", "content": beginning + TEXT * 5 + "What color is the sky?"}]
    body = {"model": NAME, "messages": messages, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    return "/v1/chat/completions", {**body, **more}


def response(beginning: str) -> tuple[str, dict[str, Any]]:
    given = beginning + TEXT * 5 + "What color is the sky?"
    body = {"model": NAME, "input": given, "max_output_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    return "/v1/responses", body


def first_of(path: str, body: dict[str, Any]) -> dict[str, Any]:
    """Return the body of llm-d's first request, for prefill."""
    limits = ("max_output_tokens",) if path == "/v1/responses" else ("max_tokens", "max_completion_tokens")
    return {**body, "stream": False, **dict.fromkeys(limits, 1), "kv_transfer_params": PREFILL_PARAMS}


SEEDED = {"temperature": 1.0, "seed": 11}


@pytest.mark.parametrize(
    ("path", "body"),
    [completion("One. "), completion("Two. ", **SEEDED), chat("Three. "), chat("Four. ", **SEEDED), response("Zero. ")],
    ids=["completion", "completion, seeded", "chat", "chat, seeded", "response"],
)
async def test_llm_ds_two_requests(servers: Servers, path: str, body: dict[str, Any]) -> None:
    """Sends the requests of pkg/sidecar/proxy/connector_nixlv2.go in llm-d-inference-scheduler."""
    servers.count()
    params = (await post(servers.first.http, path, first_of(path, body)))["kv_transfer_params"]
    answer = await post(servers.second.http, path, {**body, "kv_transfer_params": params})
    usage = answer["usage"]
    servers.assert_legs(usage.get("prompt_tokens", usage.get("input_tokens")), TOKENS)
    await servers.assert_one_servers(path, body, answer)


async def test_llm_ds_second_request_as_a_stream(servers: Servers) -> None:
    servers.count()
    path, body = completion("Five. ")
    params = (await post(servers.first.http, path, first_of(path, body)))["kv_transfer_params"]
    streamed = {"stream": True, "stream_options": {"include_usage": True}}
    *pieces, end = await events_of(servers.second.http, path, {**body, **streamed, "kv_transfer_params": params})
    servers.assert_legs(end["usage"]["prompt_tokens"], TOKENS)
    text = "".join(piece["choices"][0]["text"] for piece in pieces)
    whole = {"choices": [{"text": text, "finish_reason": pieces[-1]["choices"][0]["finish_reason"]}]}
    await servers.assert_one_servers(path, body, whole)


@pytest.mark.parametrize(
    ("path", "body"),
    [completion("Six. "), completion("Seven. ", **SEEDED), chat("Eight. "), chat("Nine. ", **SEEDED)],
    ids=["completion", "completion, seeded", "chat", "chat, seeded"],
)
async def test_smg_has_prompts_and_outputs_computed_apart(
    servers: Servers, smg: httpx.AsyncClient, plain_smg: httpx.AsyncClient, path: str, body: dict[str, Any]
) -> None:
    servers.count()
    answer = await post(smg, path, body)
    servers.assert_legs(answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"])
    await servers.assert_one_servers(path, body, answer, plain_smg)


async def test_smg_streams_what_it_answers_whole(servers: Servers, smg: httpx.AsyncClient, log: Path) -> None:
    servers.count()
    path, body = completion("Ten. ")
    streamed = {"stream": True, "stream_options": {"include_usage": True}}
    events = await events_of(smg, path, {**body, **streamed})
    servers.assert_legs(events[-1]["usage"]["prompt_tokens"], TOKENS)
    choices = [choice for event in events for choice in event["choices"]]
    text = "".join(choice["text"] for choice in choices)
    whole = {"choices": [{"text": text, "finish_reason": choices[-1]["finish_reason"]}]}
    await servers.assert_one_servers(path, body, whole)
    assert "relaying prefill kv_transfer_params" in written(log)
    assert "prefill returned no kv_transfer_params" not in written(log)


async def test_smg_keeps_parameters_to_itself_where_there_are_several_sequences(
    servers: Servers, smg: httpx.AsyncClient, log: Path
) -> None:
    servers.count()
    answer = await post(smg, *completion("Eleven. ", n=2, temperature=1.0))
    assert [choice["finish_reason"] for choice in answer["choices"]] == ["length"] * 2
    first, second, brought = servers.count()
    assert (first, brought) == (answer["usage"]["prompt_tokens"], 0)
    assert second > first
    assert "skipping kv_transfer_params relay" in written(log)


async def test_hostile_parameters_make_no_engine_ask_where_it_may_not(servers: Servers) -> None:
    connections = 0

    def asked(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        writer.close()

    listener = await asyncio.start_server(asked, "127.0.0.2", 0)
    async with listener, make_channel(servers.second.frontend.address) as channel:
        port = listener.sockets[0].getsockname()[1]
        campaign = Campaign(servers.second.http, channel, NAME, [f"127.0.0.2:{port}"], seed=2)
        await campaign.run(400)
    assert connections == 0
    assert campaign.statuses[200] > 0
    assert campaign.statuses[400] > 0
    assert {"OK", "INVALID_ARGUMENT"} == set(campaign.codes)
    assert campaign.neighbours > 0
    assert servers.second.engine.alive
