"""Other names of a model and of its adapters, on every API."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from penstock.inference.v1 import messages_pb2 as pb
from penstock_frontend.config import LoraConfig, ModelConfig
from tests.fakes.engines.lora_engine import LoraEngine
from tests.fakes.frontends.openai_server import OpenAIServer, openai_server
from tests.fakes.models.small_tokenizers import byte_level

ALIASES = {"claude-haiku-4-5": "", "gpt-4o": "model", "sailor": "pirate", "ghost": "later"}
LORA = LoraConfig(adapters={"pirate": "/a/pirate"}, roots=("/a",), http_loading=True)
MESSAGES: Any = [{"role": "user", "content": "hi"}]


@pytest.fixture
async def engine() -> AsyncIterator[LoraEngine]:
    disk = {"/a/pirate": "ahoy", "/a/later": "news"}
    async with LoraEngine("e", disk, vocab_size=byte_level().get_vocab_size()) as engine:
        yield engine


@pytest.fixture
async def api(engine: LoraEngine, chatml: Path) -> AsyncIterator[OpenAIServer]:
    model = ModelConfig(path=str(chatml), served_model_name="model", aliases=ALIASES)
    async with openai_server(model, engines=[engine.address], lora=LORA) as api:
        yield api


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "hi", "max_tokens": 1}),
        ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 1}),
        ("/v1/responses", {"input": "hi", "max_output_tokens": 1}),
        ("/v1/messages", {"messages": MESSAGES, "max_tokens": 1}),
    ],
)
async def test_an_alias_is_taken_for_what_it_stands_for(
    api: OpenAIServer, engine: LoraEngine, path: str, body: dict[str, Any]
) -> None:
    for name, meant in (("claude-haiku-4-5", "model"), ("gpt-4o", "model"), ("sailor", "pirate")):
        answer = await api.http.post(path, json={**body, "model": name})
        assert answer.status_code == 200, answer.text
        assert answer.json()["model"] == meant
        assert engine.requests[-1].lora.name == ("" if meant == "model" else meant)
    answer = await api.http.post(path, json={**body, "model": "ghost"})
    assert answer.status_code == 404
    assert "'ghost', which stands for 'later'" in answer.json()["error"]["message"]


async def test_lists_of_models_have_aliases_of_what_there_is(api: OpenAIServer) -> None:
    listed = (await api.http.get("/v1/models")).json()["data"]
    assert [each["id"] for each in listed] == ["model", "pirate", "claude-haiku-4-5", "gpt-4o", "sailor"]
    assert [each["parent"] for each in listed] == [None, "model", None, None, "model"]
    assert (await api.client.models.retrieve("sailor")).id == "sailor"
    await api.http.post("/v1/load_lora_adapter", json={"lora_name": "later", "lora_path": "/a/later"})
    assert "ghost" in [each["id"] for each in (await api.http.get("/v1/models")).json()["data"]]
    answer = await api.http.post("/v1/load_lora_adapter", json={"lora_name": "sailor", "lora_path": "/a/later"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "lora_name")


async def test_aliases_over_grpc(api: OpenAIServer, engine: LoraEngine) -> None:
    inference = api.server.stub
    models = (await inference.ListModels(pb.ListModelsRequest())).models
    assert [model.name for model in models] == ["model", "pirate", "claude-haiku-4-5", "gpt-4o", "sailor"]
    sailor = (await inference.GetModel(pb.GetModelRequest(name="sailor"))).model
    assert (sailor.name, sailor.root, sailor.parent) == ("sailor", "/a/pirate", "model")
    await api.server.outputs(model="sailor", max_tokens=1)
    assert engine.requests[-1].lora.name == "pirate"
    with pytest.raises(grpc.aio.AioRpcError, match="stands for 'later'"):
        await inference.Tokenize(pb.TokenizeRequest(model="ghost", text="hi"))
