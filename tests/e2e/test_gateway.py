"""The SMG gateway, a third-party program, in front of a frontend: OpenAI's API over ``vllm.grpc.engine.VllmEngine``."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from tests.e2e.conftest import DEMO_MODEL
from tests.fakes.clients.smg import MISSING, SMG, gateway, post, written
from tests.fakes.patience import PATIENCE
from tests.fakes.processes import Service

CHAT = {"model": "penstock-tiny", "messages": [{"role": "user", "content": "What color is the sky?"}], "temperature": 0}
COMPLETION = {"model": "penstock-tiny", "prompt": "Once upon a time", "max_tokens": 8, "temperature": 0}

pytestmark = [
    pytest.mark.skipif(SMG is None, reason=MISSING),
    pytest.mark.asyncio(loop_scope="module"),
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the path of the gateway's log."""
    return tmp_path_factory.mktemp("gateway") / "log"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(log: Path) -> AsyncIterator[httpx.AsyncClient]:
    """Yield a client of the gateway in front of one engine. The engine has the demo model and sends KV cache events."""
    engine = Service(
        "penstock_enginecore",
        model__path=DEMO_MODEL,
        cache__kv_cache_memory="64MiB",
        cache__enable_kv_events="true",
        executor__num_threads=1,
    )
    frontend = Service(
        "penstock_frontend",
        model__path=DEMO_MODEL,
        engines=json.dumps([engine.address]),
        admin__port=0,
        http__port=-1,
        server__max_connection_age=0,
    )
    async with engine, frontend:
        await engine.serving()
        await frontend.serving()
        async with gateway(frontend.address, DEMO_MODEL, "penstock-tiny", log) as client:
            yield client


async def stream(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the events of a streamed answer."""
    async with client.stream("POST", path, json={**body, "stream": True}) as response:
        lines = [line async for line in response.aiter_lines() if line.startswith("data: ")]
    assert lines.pop() == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines]


async def test_a_chat_is_answered(client: httpx.AsyncClient) -> None:
    answer = await post(client, "/v1/chat/completions", {**CHAT, "max_tokens": 24})
    assert answer["choices"][0]["message"]["content"] == "The sky is blue."
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["prompt_tokens"] > 0


async def test_a_streamed_chat_is_the_same_text_and_usage_in_pieces(client: httpx.AsyncClient) -> None:
    whole = await post(client, "/v1/chat/completions", {**CHAT, "max_tokens": 24})
    events = await stream(
        client, "/v1/chat/completions", {**CHAT, "max_tokens": 24, "stream_options": {"include_usage": True}}
    )
    choices = [choice for event in events for choice in event["choices"]]
    texts = [text for choice in choices if (text := choice["delta"].get("content"))]
    assert len(texts) > 1
    assert "".join(texts) == whole["choices"][0]["message"]["content"]
    assert choices[-1]["finish_reason"] == "stop"
    usage = events[-1]["usage"]
    assert usage["completion_tokens"] == whole["usage"]["completion_tokens"]
    assert usage["prompt_tokens"] == whole["usage"]["prompt_tokens"]


async def test_a_completion_is_the_same_streamed_and_whole(client: httpx.AsyncClient) -> None:
    whole = await post(client, "/v1/completions", COMPLETION)
    events = await stream(client, "/v1/completions", COMPLETION)
    text = "".join(choice["text"] for event in events for choice in event["choices"])
    assert text == whole["choices"][0]["text"]
    assert whole["usage"]["completion_tokens"] == 8
    assert whole["choices"][0]["finish_reason"] == "length"


async def test_log_probabilities_and_stop_strings_pass_through(client: httpx.AsyncClient) -> None:
    body = {**CHAT, "max_tokens": 24, "logprobs": True, "top_logprobs": 2, "stop": ["blue"]}
    (choice,) = (await post(client, "/v1/chat/completions", body))["choices"]
    assert choice["message"]["content"] == "The sky is "
    assert choice["finish_reason"] == "stop"
    tokens = choice["logprobs"]["content"]
    assert "".join(each["token"] for each in tokens) == "The sky is blue"
    assert {len(each["top_logprobs"]) for each in tokens} == {2}


async def test_a_schema_constrains_the_answer(client: httpx.AsyncClient) -> None:
    schema = {
        "type": "object",
        "properties": {"color": {"enum": ["blue", "red"]}},
        "required": ["color"],
        "additionalProperties": False,
    }
    wanted = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    answer = await post(client, "/v1/chat/completions", {**CHAT, "max_tokens": 40, "response_format": wanted})
    assert json.loads(answer["choices"][0]["message"]["content"])["color"] in ("blue", "red")


async def test_the_gateway_follows_what_the_engine_caches(client: httpx.AsyncClient, log: Path) -> None:
    await post(client, "/v1/completions", {**COMPLETION, "prompt": "Once upon a time there was a girl. " * 20})
    async with asyncio.timeout(PATIENCE):
        while "Learned block_size from KV event" not in written(log):
            await asyncio.sleep(0.1)
