"""``/openapi.json`` lists every route and describes its answers."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from starlette.routing import Route

from penstock_frontend.api.http.openapi import document
from tests.fakes.engines.fake_engine import FakeEngine
from tests.fakes.frontends.openai_server import OpenAIServer, openai_server
from tests.fakes.models.chat_templates import save_chat_model


@pytest.fixture
async def api(engine: FakeEngine, tmp_path: Path) -> AsyncIterator[OpenAIServer]:
    async with openai_server(save_chat_model(tmp_path), engines=[engine.address]) as server:
        yield server


async def described(api: OpenAIServer) -> dict[str, Any]:
    response = await api.http.get("/openapi.json")
    assert (response.status_code, response.headers["content-type"]) == (200, "application/json")
    answer: dict[str, Any] = response.json()
    return answer


def served(api: OpenAIServer) -> set[tuple[str, str]]:
    """Return the method and the path of every route."""
    app: Any = api.server.frontend._servers.http._server.config.app
    while not hasattr(app, "routes"):
        app = app._app
    return {
        (method.lower(), route.path.replace(":path}", "}"))
        for route in app.routes
        if isinstance(route, Route)
        for method in (route.methods or ()) - {"HEAD"}
    }


async def test_every_route_is_in_it_and_nothing_else(api: OpenAIServer) -> None:
    paths = (await described(api))["paths"]
    assert served(api) == {(method, path) for path, methods in paths.items() for method in methods}


async def test_a_route_that_is_not_served_is_not_in_it(engine: FakeEngine, model: Path) -> None:
    async with openai_server(model, engines=[engine.address], http={"page": False}) as api:
        assert not {"/", "/cluster"} & set((await described(api))["paths"])


async def test_every_reference_leads_somewhere(api: OpenAIServer) -> None:
    found = await described(api)

    def check(part: Any) -> None:
        if isinstance(part, dict):
            if isinstance(part.get("$ref"), str):
                assert part["$ref"].removeprefix("#/components/schemas/") in found["components"]["schemas"]
            for each in part.values():
                check(each)
        elif isinstance(part, list):
            for each in part:
                check(each)

    check(found)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "hi", "max_tokens": 2, "logprobs": 1}),
        ("/tokenize", {"prompt": "hi", "return_token_strs": True}),
        ("/detokenize", {"tokens": [1, 2]}),
        ("/v1/responses", {"input": "hi", "max_output_tokens": 2, "include": ["message.output_text.logprobs"]}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}),
        ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "hi"}]}),
    ],
)
async def test_answers_are_what_it_says(api: OpenAIServer, path: str, body: dict[str, Any]) -> None:
    found = await described(api)
    operation = found["paths"][path]["post"]

    def check(instance: Any, schema: dict[str, Any]) -> None:
        jsonschema.Draft202012Validator({**schema, "components": found["components"]}).validate(instance)

    response = await api.http.post(path, json=body)
    assert response.status_code == 200, response.text
    check(body, operation["requestBody"]["content"]["application/json"]["schema"])
    check(response.json(), operation["responses"]["200"]["content"]["application/json"]["schema"])
    refused = await api.http.post(path, json={})
    check(refused.json(), operation["responses"][str(refused.status_code)]["content"]["application/json"]["schema"])


def test_refused_fields_are_left_out() -> None:
    schemas = document(frozenset())["components"]["schemas"]
    assert "lora_request" not in schemas["CompletionRequest"]["properties"]
    assert "rank_fields" not in schemas["RerankBody"]["properties"]
    assert "functions" not in schemas["ChatCompletionRequest"]["properties"]
