"""What becomes of unknown fields: a log line per client, counts under few labels, refusals."""

import json
from typing import Any

import pytest
import structlog
from prometheus_client import CollectorRegistry

from penstock_common.errors import InvalidArgument
from penstock_frontend.api.openai.chat_completions import ChatCompletionRequest
from penstock_frontend.api.openai.unknown_fields import FieldPolicy, client_of
from penstock_frontend.call_types import Principal, current_principal

HI: Any = {"role": "user", "content": "hi"}


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
