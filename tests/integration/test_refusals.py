"""Errors that a reader of the request alone can understand: they name the field, value, limit and fix."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests.fakes.engines.fake_engine import FakeEngine
from tests.fakes.frontends.openai_server import OpenAIServer, openai_server
from tests.fakes.models.chat_templates import save_chat_model
from tests.fakes.models.small_tokenizers import byte_level

pytestmark = pytest.mark.asyncio(loop_scope="module")

HI: Any = {"role": "user", "content": "hi"}
CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
TOOL = {"type": "function", "function": {"name": "f", "description": "x" * 200, "parameters": {"type": "object"}}}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def api(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[OpenAIServer]:
    path: Path = save_chat_model(tmp_path_factory.mktemp("models") / "chatml")
    engine = FakeEngine(vocab_size=byte_level().get_vocab_size())
    async with engine, openai_server(path, engines=[engine.address]) as server:
        yield server


REFUSALS: list[tuple[str, dict[str, Any], str | None, str]] = [
    # the error names the limit's field as the client's API names it
    (
        CHAT,
        {"min_tokens": 5, "max_completion_tokens": 3},
        "min_tokens",
        "min_tokens is 5; it must be at most max_completion_tokens, which is 3",
    ),
    (
        RESPONSES,
        {"min_tokens": 5, "max_output_tokens": 3},
        "min_tokens",
        "min_tokens is 5; it must be at most max_output_tokens, which is 3",
    ),
    # the error names only the limit that was exceeded
    (
        CHAT,
        {"num_speculative_tokens": -1},
        "num_speculative_tokens",
        "num_speculative_tokens is -1; it must be at least 0",
    ),
    # the length includes tools and template, so the error mentions both
    (
        CHAT,
        {"tools": [TOOL]},
        "messages",
        "the conversation with its template and tools is ",
    ),
    (
        "/v1/messages",
        {"messages": [{"role": "user", "content": "x" * 200}]},
        None,
        "messages: the conversation with its template and tools is ",
    ),
    (RESPONSES, {"input": "x" * 200}, "input", "the conversation with its template and tools is "),
    # the error for a key names the object
    (COMPLETIONS, {"logit_bias": {"a": 1}}, "logit_bias", "a key of logit_bias is a string; it must be an integer"),
    # the error lists the types of the client's protocol
    (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "smell"}]}]},
        "messages[0].content[0].type",
        "messages[0].content[0].type is 'smell'; known: text, image_url, input_audio, audio_url, video_url",
    ),
    # the error lists the accepted values
    ("/v1/embeddings", {"encoding_format": "hex"}, "encoding_format", "encoding_format is 'hex'; known: float, base64"),
    (
        "/pooling",
        {"task": "plugin"},
        "task",
        "task is 'plugin'; known: embed, classify, token_embed, token_classify",
    ),
    # the error has the path of a field inside an object
    (
        CHAT,
        {"media_io_kwargs": {"image": {}}},
        "media_io_kwargs.image",
        "media_io_kwargs.image is not a known field; remove it",
    ),
    # the error has the HTTP name of a field of the gRPC API
    (
        CHAT,
        {"structured_outputs": {"json_schema": {}}},
        "structured_outputs.json_schema",
        "structured_outputs.json_schema is not a known field; use json",
    ),
    (
        CHAT,
        {"structured_outputs": {"regx": "a"}},
        "structured_outputs.regx",
        "structured_outputs.regx is not a known field; did you mean 'regex'?",
    ),
    # the error shows values in JSON notation
    (RESPONSES, {"background": True}, "background", "background is true; only false is supported"),
    (CHAT, {"modalities": ["text", "audio"]}, "modalities", 'modalities is ["text","audio"]; it must be ["text"]'),
    (
        "/v1/embeddings",
        {"normalize": True, "use_activation": False},
        "normalize",
        "normalize is true and use_activation is false; they are two names of the same setting, so set only one of them",
    ),
    # the error names replacement fields that exist on this route
    ("/rerank", {"messages": [HI]}, "messages", "messages is not supported; use query and documents"),
    ("/v1/score", {"messages": [HI]}, "messages", "messages is not supported; use queries and documents"),
    (CHAT, {"lora_request": {"lora_name": "a"}}, "lora_request", "lora_request is not supported; use lora"),
    (CHAT, {"logits_processors": ["a"]}, "logits_processors", "logits_processors is not supported; leave it out"),
    # the error names the requested task, not the fallback
    ("/rerank", {}, "model", "the model does not score: it supports neither score nor embed; it supports generate"),
    ("/pooling", {}, "model", "the model supports no pooling task; it supports generate"),
    # the error uses the client's name for the tool choice
    (
        "/v1/messages",
        {"tool_choice": {"type": "any"}},
        None,
        "tool_choice.type is 'any', but there are no tools; set tools",
    ),
    (
        COMPLETIONS,
        {"structured_outputs": {"regex": "a", "choice": ["b"]}},
        "structured_outputs",
        "structured_outputs has regex and choice; set only one of json, json_object, regex, choice, grammar, structural_tag",
    ),
    (
        COMPLETIONS,
        {"structured_outputs": {"regex": "a", "json_whitespace": "compact"}},
        "structured_outputs.json_whitespace",
        "structured_outputs.json_whitespace is set, but structured_outputs.regex does not produce JSON; set it only with ",
    ),
    (
        "/v1/score",
        {"text_1": "a", "data_2": "b", "queries": None, "documents": None},
        "text_1",
        "text_1 and data_2 are set; one",
    ),
]
BASES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [HI]},
    COMPLETIONS: {"prompt": "x"},
    RESPONSES: {"input": "hi"},
    "/v1/messages": {"messages": [HI], "max_tokens": 5},
    "/v1/embeddings": {"input": "hi"},
    "/pooling": {"input": "hi"},
    "/rerank": {"query": "a", "documents": ["b"]},
    "/v1/score": {"queries": "a", "documents": ["b"]},
}


@pytest.mark.parametrize(("route", "fields", "param", "message"), REFUSALS, ids=str)
async def test_a_refusal_speaks_of_the_request(
    api: OpenAIServer, route: str, fields: dict[str, Any], param: str | None, message: str
) -> None:
    response = await api.http.post(route, json={**BASES[route], **fields})
    error = response.json()["error"]
    assert response.status_code == 400
    assert error["message"].startswith(message)
    assert error.get("param") == param
    assert "sampling_params" not in error["message"]
