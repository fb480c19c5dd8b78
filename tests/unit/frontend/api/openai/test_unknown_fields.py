"""Unknown fields of request bodies are found in every object whose fields are known."""

import json
from typing import Any

import msgspec
import pytest
import structlog
from prometheus_client import CollectorRegistry

from penstock_common.errors import InvalidArgument
from penstock_frontend.api.anthropic.protocol import MessagesBody
from penstock_frontend.api.openai import unknown_fields
from penstock_frontend.api.openai.chat_completions import ChatCompletionRequest
from penstock_frontend.api.openai.completions import CompletionRequest
from penstock_frontend.api.openai.pooling.scoring import RerankBody
from penstock_frontend.api.openai.responses.response import ResponseBody
from penstock_frontend.api.openai.unknown_fields import FieldPolicy, client_of, find_unknown
from penstock_frontend.call_types import Principal, current_principal

HI: Any = {"role": "user", "content": "hi"}


def paths(kind: type, **body: Any) -> set[str]:
    text = json.dumps(body).encode()
    msgspec.json.decode(text, type=kind)  # the body is valid
    return {field.path for field in find_unknown(text, kind)}


@pytest.mark.parametrize(
    ("body", "path"),
    [
        ({"max_tokns": 5}, "max_tokns"),
        ({"messages": [HI, HI | {"nmae": "x"}]}, "messages[1].nmae"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "txt": 1}]}]},
            "messages[0].content[0].txt",
        ),
        (
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [{"type": "image_url", "image_url": {"url": "data:,", "detial": "low"}}],
                    }
                ]
            },
            "messages[0].content[0].image_url.detial",
        ),
        ({"tools": [{"function": {"name": "f", "params": {}}}]}, "tools[0].function.params"),
        ({"tools": [{"function": {"name": "f"}, "kind": "x"}]}, "tools[0].kind"),
        ({"tool_choice": {"type": "function", "fn": 1}}, "tool_choice.fn"),
        ({"stream_options": {"include_usgae": True}}, "stream_options.include_usgae"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "x": 1}}},
            "response_format.json_schema.x",
        ),
    ],
    ids=str,
)
def test_an_unknown_field_is_found_with_its_place(body: dict[str, Any], path: str) -> None:
    assert paths(ChatCompletionRequest, **{"messages": [HI], **body}) == {path}


@pytest.mark.parametrize(
    "body",
    [
        {"nobody_knows": None},
        {"chat_template_kwargs": {"anything": 1}},
        {"tools": [{"function": {"name": "f", "parameters": {"type": "object", "anything": 1}}}]},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"anything": 1}}}},
        {"response_format": {"type": "structural_tag", "structures": [], "triggers": []}},
        {"metadata": {"anything": 1}},
        {"tool_choice": "auto"},
        {"messages": [HI, {"role": "assistant", "content": "x", "refusal": None, "annotations": [], "audio": None}]},
    ],
    ids=str,
)
def test_null_and_clients_own_objects_are_not_unknown(body: dict[str, Any]) -> None:
    assert paths(ChatCompletionRequest, **{"messages": [HI], **body}) == set()


def test_blocks_are_looked_at_at_every_depth_and_beside_texts() -> None:
    block = {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "x", "txet": "y"}]}
    said = {"max_tokens": 5, "messages": [{"role": "user", "content": [block]}]}
    assert paths(MessagesBody, **said) == {"messages[0].content[0].content[0].txet"}
    item = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "x", "txet": "y"}], "rloe": 1}
    assert paths(ResponseBody, input=[item]) == {"input[0].content[0].txet", "input[0].rloe"}
    # Additional fields of a document are allowed.
    assert paths(RerankBody, query="a", documents=["b", {"text": "c", "title": "d"}]) == set()
    assert paths(CompletionRequest, prompt=["a", [5, 6]], promt="x") == {"promt"}


def test_a_field_of_every_message_is_told_once_and_there_is_an_end_of_telling() -> None:
    body = json.dumps({"messages": [HI | {"nmae": "x"}] * 9}).encode()
    [field] = find_unknown(body, ChatCompletionRequest)
    assert (field.path, field.shape, field.name) == ("messages[0].nmae", "messages[].nmae", "nmae")
    many = json.dumps({"messages": [HI], **{f"x{number}": 1 for number in range(1000)}}).encode()
    assert len(find_unknown(many, ChatCompletionRequest)) == 32


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (
            ChatCompletionRequest,
            {"messages": [HI, {"role": "user", "content": [{"type": "text", "text": "x"}]}], "n": 2},
        ),
        (
            ChatCompletionRequest,
            {"messages": [HI], "tools": [{"function": {"name": "f", "parameters": {"any": {"x": 1}}}}]},
        ),
        (ChatCompletionRequest, {"messages": [HI], "response_format": {"type": "json_object"}, "store": True}),
        (ResponseBody, {"input": [{"role": "user", "content": "hi"}]}),
        (
            MessagesBody,
            {
                "max_tokens": 1,
                "messages": [
                    {"role": "user", "content": [{"type": "tool_result", "content": [{"type": "text", "text": "x"}]}]}
                ],
            },
        ),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_a_body_of_known_fields_is_read_in_one_pass(
    monkeypatch: pytest.MonkeyPatch, kind: type, body: dict[str, Any]
) -> None:
    def walk(*_: object) -> None:
        raise AssertionError("every object was checked")

    monkeypatch.setattr(unknown_fields, "_walk", walk)
    assert paths(kind, model="m", **body) == set()


@pytest.mark.parametrize("levels", [1, 2, 3, 6])
def test_blocks_within_blocks_are_looked_at_however_deep(levels: int) -> None:
    block: dict[str, Any] = {"type": "text", "text": "x", "unknown": 1}
    for _ in range(levels):
        block = {"type": "tool_result", "content": [block]}
    messages = [{"role": "user", "content": [block]}]
    (path,) = paths(MessagesBody, model="m", max_tokens=1, messages=messages)
    assert path == "messages[0].content[0]" + ".content[0]" * levels + ".unknown"


# Unknown fields: a log line per client, counts with few labels, refusals.


async def check(policy: FieldPolicy, client: str = "a", **body: Any) -> None:
    await policy.check(json.dumps({"messages": [HI], **body}).encode(), ChatCompletionRequest, client)


async def told(policy: FieldPolicy, client: str = "a", **body: Any) -> list[str]:
    with structlog.testing.capture_logs() as logs:
        await check(policy, client, **body)
    return [name for log in logs if log["event"] == "request has unknown fields" for name in log["fields"]]


def counts(registry: CollectorRegistry) -> dict[str, float]:
    return {
        sample.labels["field"]: sample.value
        for metric in registry.collect()
        for sample in metric.samples
        if sample.name == "penstock:unknown_fields_total"
    }


async def test_a_field_is_logged_once_per_client() -> None:
    policy = FieldPolicy(refuse=False)
    assert await told(policy, max_tokns=1) == ["max_tokns"]
    assert await told(policy, max_tokns=2) == []
    assert await told(policy, max_tokns=2, topp=1) == ["topp"]
    assert await told(policy, "b", max_tokns=1) == ["max_tokns"]


async def test_large_bodies_are_looked_at_as_well() -> None:
    assert await told(FieldPolicy(refuse=False), max_tokns="x" * 200_000) == ["max_tokns"]


async def test_long_names_are_cut_in_the_log() -> None:
    [name] = await told(FieldPolicy(refuse=False), **{"x" * 5000: 1})
    assert name == "x" * 64 + "..."


async def test_labels_are_few_and_look_like_fields() -> None:
    registry = CollectorRegistry()
    policy = FieldPolicy(refuse=False, registry=registry)
    for strange in ("sk-my secret", "Ümlaut", "x" * 41, "a b", "CAPITALS", ""):
        await check(policy, **{strange: 1})
    assert counts(registry) == {"other": 6}
    await check(policy, messages=[HI | {"nmae": 1}] * 3)
    assert counts(registry) == {"other": 6, "messages[].nmae": 1}
    for number in range(200):
        await check(policy, **{f"x{number}": 1})
    assert len(counts(registry)) == 51
    assert sum(counts(registry).values()) == 207


@pytest.mark.parametrize(
    ("body", "field", "message"),
    [
        (
            {"max_tokns": 1},
            "max_tokns",
            "max_tokns is not a known field; did you mean 'max_tokens'? Correct it; this server ",
        ),
        (
            {"qqq": 1},
            "qqq",
            "qqq is not a known field. Remove it; this server refuses unknown fields (http.unknown_fields)",
        ),
        (
            {"stream_options": {"include_usgae": True}},
            "stream_options.include_usgae",
            "stream_options.include_usgae is not a known field; did you mean 'include_usage'? Correct it",
        ),
        (
            {"messages": [HI, HI | {"rloe": 1}]},
            "messages[1].rloe",
            "messages[1].rloe is not a known field; did you mean 'role'?",
        ),
    ],
    ids=str,
)
async def test_a_refusal_names_the_place_the_nearest_name_and_the_remedy(
    body: dict[str, Any], field: str, message: str
) -> None:
    with pytest.raises(InvalidArgument) as error:
        await check(FieldPolicy(refuse=True), **body)
    assert (error.value.field, error.value.reason) == (field, "UNKNOWN_FIELD")
    assert error.value.message.startswith(message)


async def test_known_and_listed_fields_are_not_refused() -> None:
    await check(FieldPolicy(refuse=True), user="u1", store=False, temperature=1.0, foo=None)


def test_a_client_is_its_tenant_else_its_key_else_its_address() -> None:
    scope = {"client": ("10.0.0.1", 55)}
    assert client_of(scope) == "10.0.0.1"
    assert client_of({}) == "local"
    for principal, name in ((Principal(name="key"), "key"), (Principal(name="key", tenant="acme"), "acme")):
        token = current_principal.set(principal)
        assert client_of(scope) == name
        current_principal.reset(token)
