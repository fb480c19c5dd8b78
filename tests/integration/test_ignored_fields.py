"""Ignored and unknown fields on every route: ignored fields change no answer, and unknown fields are reported,
counted or refused.
"""

import copy
import json
import re
import zlib
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio
import structlog

from penstock.enginecore.v1 import messages_pb2 as pb
from penstock_frontend.api import ignored_fields
from penstock_frontend.api.ignored_fields import IGNORED, IgnoredField
from penstock_frontend.api.media_sources import placed
from penstock_frontend.api.openai.conversation import MessageBody, messages_of
from penstock_frontend.config import LoraConfig
from tests.fakes.engines.fake_engine import FakeEngine
from tests.fakes.engines.lora_engine import LoraEngine
from tests.fakes.frontends.openai_server import OpenAIServer, openai_server
from tests.fakes.models.small_tokenizers import byte_level
from tests.integration.test_openai_pooling import serving

pytestmark = pytest.mark.asyncio(loop_scope="module")

VOCAB = byte_level().get_vocab_size()
FUNCTION = {"name": "f", "parameters": {"type": "object"}}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
PARTS = [{"type": "text", "text": "hi"}]
BODIES: dict[str, Any] = {
    ignored_fields.CHAT: {
        "messages": [
            {"role": "user", "content": PARTS},
            {"role": "assistant", "content": "x", "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "c1", "content": "7"},
        ],
        "tools": [{"type": "function", "function": FUNCTION}],
        "seed": 1,
        "max_tokens": 5,
        "stream": True,
        "stream_options": {"include_usage": True},
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}},
    },
    ignored_fields.COMPLETIONS: {"prompt": "hi", "seed": 1, "max_tokens": 5},
    ignored_fields.RESPONSES: {
        "input": [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]}],
        "seed": 1,
        "max_output_tokens": 5,
        "stream": True,
        "stream_options": {},
        "tools": [{"type": "function", **FUNCTION}],
        "text": {"format": {"type": "json_schema", "schema": {"type": "object"}}},
    },
    ignored_fields.MESSAGES: {
        "messages": [{"role": "user", "content": PARTS}, {"role": "assistant", "content": PARTS}],
        "system": PARTS,
        "tools": [{"name": "f", "input_schema": {"type": "object"}}],
        "output_config": {},
        "max_tokens": 5,
        "temperature": 0.0,
    },
    ignored_fields.EMBEDDINGS: {"input": "hi"},
    ignored_fields.POOLING: {"input": "hi", "task": "embed", "encoding_format": "base64"},
    ignored_fields.SCORES: {"queries": "a", "documents": ["b"]},
    ignored_fields.CLASSIFY: {"input": "hi"},
    ignored_fields.RERANK: {"query": "a", "documents": [{"text": "b"}]},
    ignored_fields.LORA: {"lora_name": "a"},
}
POOLED = {
    ignored_fields.EMBEDDINGS: "embed",
    ignored_fields.POOLING: "embed",
    ignored_fields.SCORES: "score",
    ignored_fields.RERANK: "score",
    ignored_fields.CLASSIFY: "classify",
}
OVER_HTTP = [field for field in IGNORED if field.protocol in BODIES]
IMAGE_DETAIL = next(field for field in IGNORED if field.name == "detail")
VARYING = re.compile(r'"(id|created|created_at|completed_at|item_id|response_id)":("[^"]*"|[0-9.]+)|obfuscation')


class Servers:
    """Frontends for each kind of model, by route."""

    def __init__(self) -> None:
        self.by_route: dict[str, OpenAIServer] = {}

    async def answer(self, route: str, body: Any) -> tuple[int, str]:
        response = await self.by_route[route].http.post(route, json=body)
        return response.status_code, VARYING.sub("", response.text)

    async def counted(self, route: str) -> str:
        metrics = (await self.by_route[route].http.get("/metrics")).text
        return "".join(line for line in metrics.splitlines() if line.startswith("penstock:unknown_fields_total"))


def digest_tokens(request: pb.EngineCoreRequest) -> list[int]:
    """Return a hash of the request as five tokens, so that any change of the request changes the output.

    The hash leaves out the seed, which is random for protocols without a seed.
    """
    params = type(request.sampling_params).FromString(request.sampling_params.SerializeToString())
    params.ClearField("seed")
    said = repr(list(request.prompt_token_ids)).encode() + params.SerializeToString(deterministic=True)
    return [65 + (zlib.crc32(said) >> 4 * place) % 16 for place in range(5)]


async def started(stack: AsyncExitStack, path: Path, http: dict[str, Any]) -> Servers:
    servers = Servers()
    engine = await stack.enter_async_context(FakeEngine(vocab_size=VOCAB, max_model_len=2048))
    engine.script = digest_tokens
    api = await stack.enter_async_context(openai_server(path, engines=[engine.address], http=http))
    for route in (ignored_fields.CHAT, ignored_fields.COMPLETIONS, ignored_fields.RESPONSES, ignored_fields.MESSAGES):
        servers.by_route[route] = api
    loras = await stack.enter_async_context(LoraEngine("e", {"/a/a": "a"}, vocab_size=VOCAB))
    loading = LoraConfig(enabled=True, roots=("/a",), http_loading=True)
    servers.by_route[ignored_fields.LORA] = await stack.enter_async_context(
        openai_server(path, engines=[loras.address], lora=loading, http=http)
    )
    return servers


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def servers(chatml: Path) -> AsyncIterator[Servers]:
    async with AsyncExitStack() as stack:
        made = await started(stack, chatml, {})
        for kind in ("embed", "score", "classify"):
            numbers = [0.25] if kind == "score" else [0.25, 0.75]
            api, _ = await stack.enter_async_context(serving(chatml, kind, vectors=lambda _, numbers=numbers: numbers))
            made.by_route |= {route: api for route, of in POOLED.items() if of == kind}
        yield made


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def strict(chatml: Path) -> AsyncIterator[Servers]:
    async with AsyncExitStack() as stack:
        made = await started(stack, chatml, {"unknown_fields": "refuse"})
        made.by_route |= dict.fromkeys(POOLED, made.by_route[ignored_fields.CHAT])
        yield made


def with_field(field: IgnoredField) -> Any:
    """Return the body for the field's protocol, with the field set to its example."""
    body = copy.deepcopy(BODIES[field.protocol])
    at = body
    for part in filter(None, field.place.split(".")):
        name = part.removesuffix("[]")
        if isinstance(at, list):  # the first object with this name
            at = next(each for each in at if isinstance(each.get(name), list | dict))
        at = at[name]
    for each in at if isinstance(at, list) else [at]:
        each[field.name] = field.example
    return body


def without(field: IgnoredField, answer: tuple[int, str]) -> tuple[int, str]:
    """Return the answer without the field's value, if answers repeat the field."""
    pair = rf',?"{field.name}":({{[^{{}}]*}}|"[^"]*"|true|null)'
    return (answer[0], re.sub(pair, "", answer[1])) if field.repeated else answer


@pytest.mark.parametrize(
    "field",
    [field for field in OVER_HTTP if field is not IMAGE_DETAIL],
    ids=lambda field: f"{field.protocol} {field.path}",
)
async def test_a_listed_field_changes_no_answer_and_is_not_told(servers: Servers, field: IgnoredField) -> None:
    route = field.protocol
    plain, before = await servers.answer(route, BODIES[route]), await servers.counted(route)
    assert plain[0] == (404 if route == ignored_fields.LORA else 200), plain
    with structlog.testing.capture_logs() as logs:
        found = await servers.answer(route, with_field(field))
    assert without(field, found) == without(field, plain)
    assert not [log for log in logs if log["event"] == "request has unknown fields"]
    assert await servers.counted(route) == before


async def test_the_detail_of_an_image_changes_no_request() -> None:
    def read(**image: str) -> Any:
        body = {
            "role": "user",
            "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA==", **image}}],
        }
        return placed(messages_of([msgspec.convert(body, MessageBody)]))

    assert read(detail=IMAGE_DETAIL.example) == read()


@pytest.mark.parametrize("route", BODIES)
async def test_an_unknown_field_is_logged_and_counted(servers: Servers, route: str) -> None:
    name = f"nobody{route.replace('/', '_')}"
    plain = await servers.answer(route, BODIES[route])
    with structlog.testing.capture_logs() as logs:
        assert await servers.answer(route, {**BODIES[route], name: 1}) == plain
        assert await servers.answer(route, {**BODIES[route], name: 1}) == plain
    told = [(log["fields"], log["client"]) for log in logs if log["event"] == "request has unknown fields"]
    assert told == [([name], "127.0.0.1")]
    assert f'field="{name}"}} 2.0' in await servers.counted(route)


@pytest.mark.parametrize("route", BODIES)
async def test_an_unknown_field_is_refused_by_a_strict_server(strict: Servers, route: str) -> None:
    status, text = await strict.answer(route, {**BODIES[route], "modle": "x"})
    error = json.loads(text)["error"]
    expected = "modle is not a known field; did you mean 'model'? Correct it; this server refuses unknown fields"
    assert status == 400
    assert error["message"].startswith(expected)
    if route != ignored_fields.MESSAGES:
        assert (error["param"], error["code"]) == ("modle", "unknown_parameter")


@pytest.mark.parametrize("route", [route for route in BODIES if route not in POOLED])
async def test_a_strict_server_takes_known_and_listed_fields(strict: Servers, route: str) -> None:
    status, text = await strict.answer(route, BODIES[route])
    assert status == (404 if route == ignored_fields.LORA else 200), text
