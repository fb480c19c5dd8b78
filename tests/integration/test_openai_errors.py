"""Errors of the HTTP API: they have OpenAI's shape and name the field, the value and the limit."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest
import pytest_asyncio
from structlog.testing import capture_logs

from penstock.common.v1 import finish_pb2
from penstock_common.config.sections import LogConfig
from penstock_frontend.config import LimitsConfig
from tests.fakes.engines.fake_engine import FakeEngine
from tests.fakes.frontends.openai_server import OpenAIServer, openai_server
from tests.fakes.models.small_tokenizers import byte_level
from tests.fakes.patience import deadlines

TOKENIZER = byte_level()
VOCAB = TOKENIZER.get_vocab_size()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(model: Path) -> AsyncIterator[OpenAIServer]:
    """Yield a server for tests that do not change its state."""
    engine = FakeEngine(vocab_size=TOKENIZER.get_vocab_size())
    await engine.start()
    async with openai_server(model, engines=[engine.address], limits=LimitsConfig(max_prompts=4)) as server:
        yield server
    await engine.kill()


async def error_of(api: OpenAIServer, body: Any, path: str = "/v1/completions", **options: Any) -> tuple[int, Any]:
    """Return the status and the error of a call."""
    content = body if isinstance(body, bytes) else None
    response = await api.http.post(path, content=content, json=None if content is not None else body, **options)
    answer = response.json()
    assert answer.keys() == {"error"}
    assert answer["error"].keys() == {"message", "type", "param", "code"}
    return response.status_code, answer["error"]


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"top_p": 7}, "top_p", "top_p is 7.0; it must be above 0 and at most 1"),
        ({"n": 0}, "n", "n is 0; it must be at least 1"),
        ({"n": 1000}, "n", "n is 1000; it must be from 1 to 128"),
        ({"max_tokens": 0}, "max_tokens", "max_tokens is 0; it must be at least 1 unless echo is set"),
        ({"max_tokens": "many"}, "max_tokens", "max_tokens is a string; it must be an integer or null"),
        ({"stop": ["a", 3]}, "stop[1]", None),
        ({"seed": 2**70}, "seed", None),
        ({"logit_bias": {"1": 200}}, "logit_bias", "logit_bias of token id 1 is 200.0; it must be from -100 to 100"),
        ({"logit_bias": {"9999": 1}}, "logit_bias", None),
        ({"stop_token_ids": [99999]}, "stop_token_ids[0]", None),
        ({"prompt": ""}, "prompt", "prompt is empty: there is no prompt"),
        ({"prompt": []}, "prompt", "prompt is an empty list; give at least one prompt"),
        ({"prompt": ["a", ""]}, "prompt[1]", "prompt[1] is empty: there is no prompt"),
        ({"prompt": ["a", 5]}, "prompt[1]", "prompt[1] is 5, a token id, but other entries are not token ids"),
        ({"prompt": [7, 99999]}, "prompt", f"prompt[1] is 99999; it must be below the vocabulary size, {VOCAB}"),
        ({"prompt": ["a"] * 5}, "prompt", "prompt has 5 prompts; limits.max_prompts is 4"),
        ({"prompt": {"text": "a"}}, "prompt", None),
        ({"suffix": "x"}, "suffix", "suffix is set, but the model has no fill-in-the-middle tokens; leave suffix out"),
        (
            {"suffix": "x", "prompt": [5]},
            "prompt",
            "suffix is set, but prompt is token ids; with suffix, prompt must be text",
        ),
        ({"suffix": "x", "echo": True}, "echo", None),
        ({"best_of": 1, "n": 2}, "best_of", "best_of is 1; it must be at least n, which is 2"),
        ({"best_of": 1000}, "best_of", "best_of is 1000; it must be from 1 to 128"),
        ({"best_of": 2, "stream": True}, "best_of", None),
        (
            {"guided_json": {"type": "object"}, "grammar": 'root ::= "a"'},
            "guided_json",
            "grammar and guided_json both constrain the output; set only one of them",
        ),
        ({"structured_outputs": {"foo": 1}}, "structured_outputs.foo", None),
        ({"response_format": {"type": "json_object", "foo": 1}}, "response_format.foo", None),
        (
            {"max_tokens": 5, "n_predict": 6},
            "n_predict",
            "max_tokens is 5 and n_predict is 6; they are two names of the same setting, so set only one of them",
        ),
        (
            {"prompt_logprobs": 1, "stream": True},
            "prompt_logprobs",
            "prompt_logprobs is set, but a stream does not support it; set stream to false",
        ),
        ({"response_format": {"type": "xml"}}, "response_format.type", None),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", None),
        ({"response_format": "json"}, "response_format", None),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs", None),
        (
            {"structured_outputs": {"json_object": True, "json_whitespace": "tight"}},
            "structured_outputs.json_whitespace",
            "structured_outputs.json_whitespace is 'tight'; known: dumps, compact, any",
        ),
        (
            {"structured_outputs": {"json_object": True, "whitespace_pattern": "[ ]*"}},
            "structured_outputs.whitespace_pattern",
            None,
        ),
        (
            {"structured_outputs": {"json_object": True, "json_whitespace": "any", "disable_any_whitespace": True}},
            "structured_outputs.disable_any_whitespace",
            None,
        ),
        (
            {"structured_outputs": {"regex": "a", "json_whitespace": "compact"}},
            "structured_outputs.json_whitespace",
            None,
        ),
        ({"structured_outputs": {"json_whitespace": "compact"}}, "structured_outputs", None),
        ({"structured_outputs": {"regex": ""}}, "structured_outputs.regex", "structured_outputs.regex is empty"),
        (
            {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
            "structured_outputs",
            None,
        ),
        (
            {"min_tokens": 9, "max_tokens": 3},
            "min_tokens",
            "min_tokens is 9; it must be at most max_tokens, which is 3",
        ),
        ({"echo": True, "logprobs": 1, "stream": True, "n": 2}, "stream", None),
        ({"priority": 2**40}, "priority", None),
        ({"stream_interval": 0}, "stream_interval", None),
        ({"truncation_side": "right"}, "truncation_side", "truncation_side is 'right'; it must be 'left'"),
        (
            {"thinking_token_budget": 5},
            "thinking_token_budget",
            "thinking_token_budget is 5, but the server cannot limit this model's reasoning, because the model has no reasoning "
            "parser (model.reasoning_parser), or its reasoning tags have several tokens; remove the field and set max_tokens",
        ),
        (
            {"thinking_token_budget": -2},
            "thinking_token_budget",
            "thinking_token_budget is -2; it must be at least -1",
        ),
    ],
    ids=str,
)
async def test_a_wrong_field_is_named(
    shared: OpenAIServer, body: dict[str, Any], param: str, message: str | None
) -> None:
    status, error = await error_of(shared, {"prompt": "x", **body})
    assert (status, error["type"], error["param"]) == (400, "invalid_request_error", param)
    assert error["message"] == message or (message is None and param.split("[")[0].split(".")[-1] in error["message"])
    assert "sampling_params" not in error["message"]


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b"\xff\xfe", b'{"prompt": "\\ud800"}', b"nothing"])
async def test_a_body_that_is_no_json_object_is_refused(api: OpenAIServer, raw: bytes) -> None:
    status, error = await error_of(api, raw)
    assert status == 400
    assert error["code"] in ("invalid_json", "invalid_type")


@pytest.mark.parametrize(
    "path", ["/v1/completions", "/v1/chat/completions", "/v1/embeddings", "/tokenize", "/detokenize"]
)
async def test_a_body_that_nests_without_end_is_refused(api: OpenAIServer, path: str) -> None:
    status, error = await error_of(api, b'{"unknown":' * 5000, path)
    assert (status, error["code"]) == (400, "body_too_complex")
    assert error["message"] == "the body's lists and objects are nested more than 512 levels deep"


async def test_a_missing_prompt_is_named(api: OpenAIServer) -> None:
    status, error = await error_of(api, {})
    assert (status, error["param"], error["message"]) == (400, "prompt", "prompt is not set")


async def test_a_prompt_that_is_too_long_has_openais_code(api: OpenAIServer) -> None:
    with pytest.raises(openai.BadRequestError, match=r"prompt is 200 tokens; max_model_len is 128") as caught:
        await api.client.completions.create(model="model", prompt=[5] * 200)
    assert caught.value.code == "context_length_exceeded"


async def test_another_model_is_not_found(api: OpenAIServer) -> None:
    with pytest.raises(openai.NotFoundError, match="model is 'other'; known: model") as caught:
        await api.client.completions.create(model="other", prompt="x")
    assert caught.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError):
        await api.client.models.retrieve("other")


async def test_another_path_and_another_method_are_refused(api: OpenAIServer) -> None:
    status, error = await error_of(api, {}, "/v1/images/generations")
    assert (status, error["message"]) == (404, "there is no /v1/images/generations")
    status, error = await error_of(api, {}, "/v1/chat/completion")
    assert (status, error["message"]) == (404, "there is no /v1/chat/completion; did you mean '/v1/chat/completions'?")
    status, error = await error_of(api, {}, "/v1/load_lora_adapter")
    assert (status, error["message"]) == (404, "there is no /v1/load_lora_adapter: lora.http_loading is false")
    response = await api.http.get("/v1/completions")
    assert (response.status_code, response.json()["error"]["code"]) == (405, "method_not_allowed")


WITH_V1 = "Set the client's base_url to the server's address with /v1 appended once"
WITHOUT_V1 = "Set the client's base_url to the server's address without /v1, for an Anthropic client"


@pytest.mark.parametrize(
    ("path", "meant", "remedy"),
    [
        ("/v1/v1/chat/completions", "/v1/chat/completions", WITH_V1),
        ("/chat/completions", "/v1/chat/completions", WITH_V1),
        ("/completions", "/v1/completions", WITH_V1),
        ("/v1/chat/completions/chat/completions", "/v1/chat/completions", WITH_V1),
        ("/v1/v1/models", "/v1/models", WITH_V1),
        ("/v1/v1/messages", "/v1/messages", WITHOUT_V1),
        ("/messages", "/v1/messages", WITHOUT_V1),
        ("/v1/v1/messages/count_tokens", "/v1/messages/count_tokens", WITHOUT_V1),
    ],
)
async def test_a_path_of_a_wrong_base_url_has_a_hint(api: OpenAIServer, path: str, meant: str, remedy: str) -> None:
    response = await api.http.post(path, json={})
    said = f"there is no {path}; did you mean {meant}? {remedy}"
    assert (response.status_code, response.json()["error"]["message"]) == (404, said)
    assert (response.json().get("type") == "error") is ("/v1/messages" in path)


@pytest.mark.parametrize(("method", "path", "status"), [("GET", "/v1/completions", 405), ("POST", "/v1/nothing", 404)])
async def test_refusals_of_paths_have_the_form_of_the_client_and_an_id(
    api: OpenAIServer, method: str, path: str, status: int
) -> None:
    ours = await api.http.request(method, path)
    assert (ours.status_code, "param" in ours.json()["error"]) == (status, True)
    assert len(ours.headers["x-request-id"]) == 32
    assert ours.headers["request-id"] == ours.headers["x-request-id"]
    theirs = await api.http.request(method, path, headers={"anthropic-version": "2023-06-01", "x-request-id": "mine"})
    assert (theirs.status_code, theirs.json()["type"], theirs.json()["request_id"]) == (status, "error", "mine")
    assert theirs.headers["x-request-id"] == "mine"


async def test_a_body_that_is_too_large_is_refused(engine: FakeEngine, model: Path) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(20):
            yield b"x" * 100

    async with openai_server(model, engines=[engine.address], http={"max_body_bytes": 1000}) as api:
        status, error = await error_of(api, b"x" * 1001)
        assert (status, error["message"]) == (413, "the body has 1001 bytes; http.max_body_bytes is 1000")
        response = await api.http.post("/v1/completions", content=pieces())
        assert (response.status_code, response.json()["error"]["code"]) == (413, "request_too_large")
        assert (await api.http.post("/v1/completions", json={"prompt": "x" * 900})).status_code == 400


async def test_too_many_calls_are_told_when_to_retry(manual: FakeEngine, model: Path) -> None:
    log = LogConfig(requests=True)
    async with openai_server(model, engines=[manual.address], http={"max_requests": 1}, log=log) as api:
        of_acme = {"x-penstock-tenant": "acme"}
        call = api.client.completions.create(model="model", prompt="x", max_tokens=1, seed=10, extra_headers=of_acme)
        running = asyncio.create_task(call)
        await manual.until(lambda e: e.running)
        headers = {"x-request-id": "late", **of_acme}
        with capture_logs() as lines:
            response = await api.http.post("/v1/completions", json={"prompt": "x"}, headers=headers)
        assert (response.status_code, response.headers["retry-after"]) == (429, "1")
        [line] = [line for line in lines if line["event"] == "request refused"]
        assert (line["request"], line["tenant"], line["reason"]) == ("late", "acme", "QUEUE_FULL")
        assert (
            'requests_refused_total{model_name="model",reason="QUEUE_FULL"} 1.0'
            in (await api.http.get("/metrics")).text
        )
        assert response.json()["error"]["message"] == "1 HTTP requests are being served; http.max_requests is 1"
        manual.step()
        assert (await running).choices[0].finish_reason == "length"
        assert (await api.http.get("/v1/models")).status_code == 200


async def test_a_full_queue_of_the_engine_is_told_with_its_delay(api: OpenAIServer, engine: FakeEngine) -> None:
    engine.refusal = finish_pb2.RequestError(
        code="RESOURCE_EXHAUSTED", message="the queue is full", reason="QUEUE_FULL", retry_after=2.5
    )
    with pytest.raises(openai.RateLimitError, match="the queue is full") as caught:
        await api.client.completions.create(model="model", prompt="x", stream=True)
    assert caught.value.response.headers["retry-after"] == "3"
    assert caught.value.code == "rate_limit_exceeded"


@pytest.mark.parametrize(
    ("code", "status", "kind"),
    [
        ("INVALID_ARGUMENT", 400, "invalid_request_error"),
        ("UNIMPLEMENTED", 400, "invalid_request_error"),
        ("UNAVAILABLE", 503, "service_unavailable_error"),
        ("DEADLINE_EXCEEDED", 504, "timeout_error"),
        ("INTERNAL", 500, "server_error"),
    ],
)
async def test_errors_of_the_engine_have_their_status(
    api: OpenAIServer, engine: FakeEngine, code: str, status: int, kind: str
) -> None:
    engine.refusal = finish_pb2.RequestError(code=code, message="no")
    found, error = await error_of(api, {"prompt": "x"})
    # The message begins with the number of attempts.
    assert (found, error["type"], error["message"].split()[-1]) == (status, kind, "no")


async def test_without_an_engine_the_answer_is_unavailable(model: Path) -> None:
    async with openai_server(model, engines=["127.0.0.1:1"], wait=False, engine_wait_timeout=0.05) as api:
        with pytest.raises(openai.InternalServerError, match=r"no engine accepted requests within 0\.05 s") as caught:
            await api.client.completions.create(model="model", prompt="x")
        assert (caught.value.status_code, caught.value.response.headers["retry-after"]) == (503, "1")
        assert (await api.http.get("/health")).status_code == 503


async def test_a_deadline_of_the_header_ends_the_work_in_the_engine(manual: FakeEngine, model: Path) -> None:
    async with openai_server(model, engines=[manual.address]) as api:
        for seconds in deadlines():
            status, error = await error_of(api, {"prompt": "x"}, headers={"x-request-timeout": str(seconds)})
            assert (status, error["type"]) == (504, "timeout_error")
            if manual.requests:
                break
        await manual.until(lambda e: e.aborted)
        assert manual.running == {}


@pytest.mark.parametrize("value", ["soon", "0", "-1", "nan", "1e9"])
async def test_a_wrong_deadline_is_refused(api: OpenAIServer, value: str) -> None:
    status, error = await error_of(api, {"prompt": "x"}, headers={"x-request-timeout": value})
    assert (status, error["param"]) == (400, "x-request-timeout")


async def test_calls_with_one_id_run_beside_each_other(manual: FakeEngine, model: Path) -> None:
    async with openai_server(model, engines=[manual.address]) as api:
        headers = {"x-request-id": "mine"}
        calls = [
            asyncio.create_task(api.http.post("/v1/completions", json={"prompt": "x"}, headers=headers)) for _ in "ab"
        ]
        await manual.until(lambda e: len(e.running) == 2)
        while manual.running:
            manual.step()
        for response in await asyncio.gather(*calls):
            assert (response.status_code, response.json()["id"]) == (200, "cmpl-mine")


async def test_web_pages_are_let_in_only_where_they_are_listed(engine: FakeEngine, model: Path) -> None:
    ask = {"origin": "https://page.example", "access-control-request-method": "POST"}
    async with openai_server(model, engines=[engine.address]) as api:
        response = await api.http.get("/v1/models", headers=ask)
        assert "access-control-allow-origin" not in response.headers
    allowed = {"allowed_origins": ("https://page.example",)}
    async with openai_server(model, engines=[engine.address], http=allowed) as api:
        response = await api.http.options("/v1/completions", headers=ask)
        assert response.headers["access-control-allow-origin"] == "https://page.example"
