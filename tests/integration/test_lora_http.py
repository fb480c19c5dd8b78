"""LoRA adapters over HTTP, in front of an engine without a model.

Requests name adapters, and clients load and unload adapters with vLLM's API.
"""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest

from penstock_common.errors import ConfigError
from penstock_frontend.config import AuthConfig, LoraConfig
from tests.fakes.engines.lora_engine import LoraEngine, digest_of
from tests.fakes.frontends.openai_server import OpenAIServer, openai_server
from tests.fakes.models.small_tokenizers import byte_level

VOCAB = byte_level().get_vocab_size()
CONFIG = LoraConfig(adapters={"pirate": "/a/pirate"}, roots=("/a",), http_loading=True)
DISK = {"/a/pirate": "ahoy", "/a/new": "news"}
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
NEW = {"lora_name": "new", "lora_path": "/a/new"}
MESSAGES: Any = [{"role": "user", "content": "hi"}]


@pytest.fixture
async def engine() -> AsyncIterator[LoraEngine]:
    async with LoraEngine("e", dict(DISK), vocab_size=VOCAB) as engine:
        yield engine


@pytest.fixture
async def api(engine: LoraEngine, model: Path) -> AsyncIterator[OpenAIServer]:
    async with openai_server(model, engines=[engine.address], lora=CONFIG) as api:
        yield api


def applied(engine: LoraEngine) -> str:
    """Return the adapter of the engine's last request."""
    return engine.requests[-1].lora.name


async def test_a_completion_names_an_adapter_as_its_model(api: OpenAIServer, engine: LoraEngine) -> None:
    done = await api.client.completions.create(model="pirate", prompt="hi", max_tokens=1)
    assert (applied(engine), done.model) == ("pirate", "pirate")
    assert engine.requests[-1].lora.digest == digest_of("ahoy")
    done = await api.client.completions.create(model="model", prompt="hi", max_tokens=1)
    assert (applied(engine), done.model) == ("", "model")
    done = await api.client.completions.create(model="model", prompt="hi", max_tokens=1, extra_body={"lora": "pirate"})
    assert (applied(engine), done.model) == ("pirate", "pirate")
    pieces = await api.client.completions.create(model="pirate", prompt="hi", max_tokens=2, stream=True)
    assert {piece.model async for piece in pieces} == {"pirate"}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "hi", "max_tokens": 1}),
        ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 1}),
        ("/v1/responses", {"input": "hi", "max_output_tokens": 1}),
        ("/v1/messages", {"messages": MESSAGES, "max_tokens": 1}),
    ],
)
async def test_all_routes_that_generate_take_adapters(
    engine: LoraEngine, chatml: Path, path: str, body: dict[str, Any]
) -> None:
    async with openai_server(chatml, engines=[engine.address], lora=CONFIG) as api:
        for named in ({"model": "pirate"}, {"model": "model", "lora": "pirate"}, {"lora": "pirate"}):
            answer = await api.http.post(path, json=body | named)
            assert answer.status_code == 200, answer.text
            assert (applied(engine), answer.json()["model"]) == ("pirate", "pirate")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "hi"}),
        ("/v1/chat/completions", {"messages": MESSAGES}),
        ("/v1/responses", {"input": "hi"}),
        ("/v1/messages", {"messages": MESSAGES, "max_tokens": 1}),
        ("/v1/embeddings", {"input": "hi"}),
        ("/v1/score", {"queries": "a", "documents": "b"}),
        ("/v1/rerank", {"query": "a", "documents": ["b"]}),
        ("/classify", {"input": "hi"}),
        ("/pooling", {"input": "hi"}),
    ],
)
async def test_all_routes_refuse_names_that_there_are_not(
    api: OpenAIServer, engine: LoraEngine, path: str, body: dict[str, Any]
) -> None:
    for named, status, word in (
        ({"model": "priate"}, 404, "did you mean 'pirate'?"),
        ({"lora": "priate"}, 404, "did you mean 'pirate'?"),
    ):
        answer = await api.http.post(path, json=body | named)
        assert answer.status_code == status, answer.text
        assert word in answer.json()["error"]["message"]
    assert not engine.requests


async def test_adapters_are_models_whose_parent_is_the_model(api: OpenAIServer) -> None:
    base, pirate = (await api.http.get("/v1/models")).json()["data"]
    assert (base["id"], base["parent"]) == ("model", None)
    assert (pirate["id"], pirate["parent"], pirate["root"]) == ("pirate", "model", "/a/pirate")
    assert pirate["max_model_len"] == base["max_model_len"] == 128
    assert (await api.client.models.retrieve("pirate")).id == "pirate"
    with pytest.raises(openai.NotFoundError):
        await api.client.models.retrieve("priate")


async def test_adapters_are_loaded_and_unloaded_as_with_vllm(api: OpenAIServer, engine: LoraEngine) -> None:
    answer = await api.http.post(LOAD, json=NEW)
    assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'new' added successfully.")
    assert answer.headers["content-type"].startswith("text/plain")
    await api.client.completions.create(model="new", prompt="hi", max_tokens=1)
    assert applied(engine) == "new"
    engine.disk["/a/new"] = "news 2"
    answer = await api.http.post(LOAD, json=NEW)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "lora_name")
    answer = await api.http.post(LOAD, json={**NEW, "load_inplace": True})
    assert (answer.status_code, digest_of("news 2") in engine.held) == (200, True)
    answer = await api.http.post(UNLOAD, json={"lora_name": "new"})
    assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'new' removed successfully.")
    answer = await api.http.post(UNLOAD, json={"lora_name": "new"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (404, "lora_name")
    assert (await api.http.post(UNLOAD, json={"lora_name": "pirate"})).status_code == 400


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({"lora_name": "new"}, 400, "lora_path"),
        ({"lora_path": "/a/new"}, 400, "lora_name"),
        ({**NEW, "lora_path": "/b/new"}, 403, "lora_path"),
        ({**NEW, "lora_name": "model"}, 400, "lora_name"),
        ({**NEW, "lora_name": "pirate"}, 400, "lora_name"),
        ({**NEW, "lora_path": "/a/none"}, 400, None),
    ],
)
async def test_loads_that_fail_name_the_field(
    api: OpenAIServer, body: dict[str, Any], status: int, param: str | None
) -> None:
    answer = await api.http.post(LOAD, json=body)
    assert answer.status_code == status, answer.text
    assert param in (None, answer.json()["error"]["param"])


async def test_loading_is_not_served_unless_it_is_wanted(engine: LoraEngine, model: Path) -> None:
    quiet = LoraConfig(adapters={"pirate": "/a/pirate"}, roots=("/a",))
    async with openai_server(model, engines=[engine.address], lora=quiet) as api:
        for path in (LOAD, UNLOAD):
            assert (await api.http.post(path, json=NEW)).status_code == 404
        assert LOAD not in (await api.http.get("/openapi.json")).json()["paths"]
    with pytest.raises(ConfigError, match=r"lora\.http_loading is true, but LoRA adapters are off"):
        LoraConfig(http_loading=True)


async def test_loading_is_for_operators_where_callers_are_known(
    engine: LoraEngine, model: Path, tmp_path: Path
) -> None:
    keys = tmp_path / "keys.txt"
    keys.write_text("sk-user-0123456789 name=user\nsk-oncall-0123456789 name=oncall scopes=inference,admin\n")
    auth = AuthConfig(api_keys=str(keys))
    async with openai_server(model, engines=[engine.address], lora=CONFIG, auth=auth) as api:
        for key, status in (("", 401), ("sk-user-0123456789", 403), ("sk-oncall-0123456789", 200)):
            headers = {"authorization": f"Bearer {key}"} if key else {}
            for path in (LOAD, UNLOAD):
                assert (await api.http.post(path, json=NEW, headers=headers)).status_code == status
        user = {"authorization": "Bearer sk-user-0123456789"}
        body = {"model": "pirate", "prompt": "hi", "max_tokens": 1}
        assert (await api.http.post("/v1/completions", json=body, headers=user)).status_code == 200


async def test_the_document_describes_loading(api: OpenAIServer) -> None:
    document = (await api.http.get("/openapi.json")).json()
    load = document["paths"][LOAD]["post"]
    assert load["requestBody"]["content"]["application/json"]["schema"]["$ref"].endswith("/LoadLoraAdapterRequest")
    assert load["responses"]["200"]["content"] == {"text/plain; charset=utf-8": {"schema": {"type": "string"}}}
    assert "application/json" in load["responses"]["403"]["content"]
