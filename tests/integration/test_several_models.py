"""A frontend with several models: the request's model chooses the engines, over gRPC and HTTP."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from prometheus_client.parser import text_string_to_metric_families

from penstock.admin.v1 import messages_pb2 as admin_pb
from penstock.inference.v1 import messages_pb2 as pb
from penstock_common.config.sections import ServerConfig
from penstock_common.errors import InvalidArgument, NotFound
from penstock_frontend.config import FurtherModelConfig, LimitsConfig, LoraConfig, ModelConfig
from tests.fakes.engines.fake_engine import FakeEngine
from tests.fakes.engines.lora_engine import LoraEngine
from tests.fakes.frontends.frontend_server import collect, eventually, failure, make_request
from tests.fakes.frontends.openai_server import OpenAIServer, openai_server
from tests.fakes.models.small_tokenizers import byte_fallback, byte_level

MESSAGES: Any = [{"role": "user", "content": "hi"}]
LEFT_VOCAB, RIGHT_VOCAB = byte_level().get_vocab_size(), byte_fallback().get_vocab_size()


class Two(NamedTuple):
    api: OpenAIServer
    left: FakeEngine
    right: LoraEngine


@pytest.fixture(scope="module")
def right_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("right")
    byte_fallback().save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture
async def two(chatml: Path, right_model: Path) -> AsyncIterator[Two]:
    """Yield a frontend with the models ``left``, with a chat template, and ``right``, with a LoRA adapter."""
    disk = {"/a/pirate": "ahoy", "/a/later": "news"}
    async with AsyncExitStack() as stack:
        left = await stack.enter_async_context(FakeEngine("e-left", model="left", vocab_size=LEFT_VOCAB))
        right = await stack.enter_async_context(LoraEngine("e-right", disk, model="right", vocab_size=RIGHT_VOCAB))
        further = FurtherModelConfig(
            model=ModelConfig(path=str(right_model), served_model_name="right", aliases={"second": ""}),
            engines=(right.address,),
            lora=LoraConfig(adapters={"pirate": "/a/pirate"}, roots=("/a",), http_loading=True),
        )
        model = ModelConfig(path=str(chatml), served_model_name="left", aliases={"first": ""})
        api = await stack.enter_async_context(openai_server(model, engines=[left.address], models=(further,)))
        await eventually(lambda: all(each.assembly.engines.usable for each in api.server.frontend._models))
        yield Two(api, left, right)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "hi", "max_tokens": 2, "seed": 1}),
        ("/tokenize", {"prompt": "hi there"}),
        ("/detokenize", {"tokens": [70, 71]}),
    ],
)
async def test_the_model_of_a_body_chooses_the_model(two: Two, path: str, body: dict[str, Any]) -> None:
    answers = {}
    for name in ("left", "first", "right", "second"):
        answer = await two.api.http.post(path, json={**body, "model": name})
        assert answer.status_code == 200, answer.text
        answers[name] = {k: v for k, v in answer.json().items() if k not in ("id", "created", "metrics")}
    assert answers["left"] == answers["first"] != answers["right"] == answers["second"]
    if path == "/v1/completions":
        assert (answers["first"]["model"], answers["second"]["model"]) == ("left", "right")
        assert (len(two.left.requests), len(two.right.requests)) == (2, 2)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses"])
async def test_each_protocol_of_conversations_chooses_the_model(two: Two, path: str) -> None:
    body = {"input": "hi", "max_output_tokens": 16} if "responses" in path else {"messages": MESSAGES, "max_tokens": 1}
    assert (await two.api.http.post(path, json={**body, "model": "left"})).json()["model"] == "left"
    refused = await two.api.http.post(path, json={**body, "model": "right"})  # it has no chat template
    assert refused.status_code == 400
    assert "chat template" in refused.json()["error"]["message"]
    unknown = await two.api.http.post(path, json={**body, "model": "rihgt"})
    assert unknown.status_code == 404
    assert "known: left, right; did you mean 'right'?" in unknown.json()["error"]["message"]


async def test_a_body_without_a_model_gets_the_names_of_the_models(two: Two) -> None:
    for body in ({}, {"model": ""}, {"model": None}):
        answer = await two.api.http.post("/v1/completions", json={"prompt": "hi", **body})
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert (
            error["message"] == "model is empty, but this server has several models; set model to one of: left, right"
        )
        assert error["param"] == "model"
    assert (await two.api.http.post("/v1/completions", content=b"{")).status_code == 400
    wrong = await two.api.http.post("/v1/completions", json={"prompt": "hi", "model": 3})
    assert wrong.status_code == 400
    assert wrong.json()["error"]["param"] == "model"


async def test_an_adapter_belongs_to_one_model(two: Two) -> None:
    for body in ({"model": "pirate"}, {"lora": "pirate"}, {"model": "right", "lora": "pirate"}):
        answer = await two.api.http.post("/v1/completions", json={"prompt": "hi", "max_tokens": 1, **body})
        assert answer.json()["model"] == "pirate", answer.text
    assert [request.lora.name for request in two.right.requests] == ["pirate"] * 3
    refused = await two.api.http.post("/v1/completions", json={"prompt": "hi", "model": "left", "lora": "pirate"})
    assert refused.status_code == 400
    assert "this frontend has no LoRA adapters" in refused.json()["error"]["message"]


async def test_lists_of_models_have_all_models(two: Two) -> None:
    listed = (await two.api.http.get("/v1/models")).json()["data"]
    assert [each["id"] for each in listed] == ["left", "first", "right", "pirate", "second"]
    assert {each["id"]: each["parent"] for each in listed if each["parent"]} == {"pirate": "right"}
    theirs = (await two.api.http.get("/v1/models", headers={"anthropic-version": "2023-06-01"})).json()
    assert [each["id"] for each in theirs["data"]] == ["left", "right", "pirate"]
    models = (await two.api.server.stub.ListModels(pb.ListModelsRequest())).models
    assert [each.name for each in models] == ["left", "first", "right", "pirate", "second"]
    assert {each.name: each.vocab_size for each in models}["second"] == RIGHT_VOCAB
    assert (await two.api.http.get("/v1/models/pirate")).json()["parent"] == "right"
    assert (await two.api.http.get("/v1/models/rigth")).status_code == 404
    got = await two.api.server.stub.GetModel(pb.GetModelRequest(name="second"))
    assert (got.model.name, got.model.vocab_size) == ("second", RIGHT_VOCAB)


async def test_the_model_of_a_grpc_call_chooses_the_model(two: Two) -> None:
    server = two.api.server
    await server.outputs(model="right", max_tokens=1)
    await server.outputs(lora="pirate", max_tokens=1)
    await server.outputs(model="first", max_tokens=1)
    assert (len(two.left.requests), len(two.right.requests)) == (1, 2)
    tokens = [await server.stub.Tokenize(pb.TokenizeRequest(text="hi", model=name)) for name in ("left", "right")]
    assert tokens[0].token_ids != tokens[1].token_ids
    unknown = await failure(server.generate(model="rihgt"))
    assert isinstance(unknown, NotFound)
    assert "did you mean 'right'?" in unknown.message
    for call in (
        server.generate(),
        server.stub.Tokenize(pb.TokenizeRequest(text="hi")),
        server.stub.Embed(pb.EmbedRequest(inputs=[pb.PoolingInput(text="hi")])),
    ):
        empty = await failure(call)
        assert isinstance(empty, InvalidArgument)
        assert empty.message.endswith("set model to one of: left, right")


async def test_a_session_may_use_several_models(two: Two) -> None:
    requests = [
        pb.GenerateSessionRequest(generate=make_request(model=name, request_id=name, max_tokens=1))
        for name in ("left", "right", "none")
    ]
    responses = await collect(two.api.server.stub.GenerateSession(iter(requests)))
    assert {each.output.request_id for each in responses if each.HasField("output")} == {"left", "right"}
    assert [each.error.request_id for each in responses if each.HasField("error")] == ["none"]


async def test_a_model_without_engines_leaves_the_others_in_service(two: Two) -> None:
    server = two.api.server
    await server.until_health(serving=True, service="model/right")
    await two.right.kill()
    await server.until_health(serving=False, service="model/right")
    await server.until_health(serving=True, service="model/left")
    await server.until_health(serving=True)
    assert (await two.api.http.get("/health")).status_code == 200
    await server.outputs(model="left", max_tokens=1)
    held = server.generate(model="right", timeout=0.2)
    assert (await failure(held)).code == "DEADLINE_EXCEEDED"


async def test_adapters_are_loaded_for_the_named_model(two: Two) -> None:
    load = {"lora_name": "later", "lora_path": "/a/later"}
    without = await two.api.http.post("/v1/load_lora_adapter", json=load)
    assert without.status_code == 400
    assert "left, right" in without.json()["error"]["message"]
    off = await two.api.http.post("/v1/load_lora_adapter", json={**load, "model": "left"})
    assert "lora.http_loading of model left is false" in off.json()["error"]["message"]
    taken = await two.api.http.post("/v1/load_lora_adapter", json={**load, "lora_name": "first", "model": "right"})
    assert "which already stands for the model 'left'" in taken.json()["error"]["message"]
    done = await two.api.http.post("/v1/load_lora_adapter", json={**load, "model": "right"})
    assert done.status_code == 200, done.text
    listed = await two.api.server.admin.ListLoras(admin_pb.ListLorasRequest())
    assert list(listed.names) == ["later", "pirate"]
    gone = await two.api.http.post("/v1/unload_lora_adapter", json={"lora_name": "later"})
    assert gone.status_code == 200, gone.text


async def test_operators_calls_are_for_all_models_or_for_one(two: Two) -> None:
    admin = two.api.server.admin
    cluster = await admin.GetCluster(admin_pb.GetClusterRequest())
    assert {engine.engine_id: engine.model for engine in cluster.engines} == {"e-left": "left", "e-right": "right"}
    one = await admin.GetCluster(admin_pb.GetClusterRequest(model="right"))
    assert [engine.engine_id for engine in one.engines] == ["e-right"]
    assert set((await admin.IsSleeping(admin_pb.IsSleepingRequest())).engines) == {"e-left", "e-right"}
    await admin.Sleep(admin_pb.SleepRequest(level=1, model="right"))
    assert [method for method, _ in two.left.utility_calls if method == "sleep"] == []
    assert [method for method, _ in two.right.utility_calls if method == "sleep"] == ["sleep"]
    unknown = await failure(admin.Resume(admin_pb.ResumeRequest(model="none")))
    assert isinstance(unknown, NotFound)
    drained = await collect(admin.Drain(admin_pb.DrainRequest(engine_id="e-right")))
    assert drained[-1].done


async def test_metrics_have_one_family_for_all_models(two: Two) -> None:
    for name in ("left", "right"):
        await two.api.server.outputs(model=name, max_tokens=1)
    text = (await two.api.http.get("/metrics")).text
    assert text.count("# TYPE vllm:request_success_total ") == 1
    assert text.count("# TYPE process_cpu_seconds_total ") == 1
    found = [
        (sample.name, tuple(sorted(sample.labels.items())))
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    ]
    assert len(found) == len(set(found))
    ended = {dict(labels)["model_name"] for name, labels in found if name == "vllm:request_success_total"}
    assert ended == {"left", "right"}


async def test_the_page_offers_all_models(two: Two) -> None:
    first = (await two.api.http.get("/cluster")).json()
    assert (first["model"], first["models"], first["chat"]) == ("left", ["left", "right"], True)
    second = (await two.api.http.get("/cluster", params={"model": "right"})).json()
    assert (second["model"], second["chat"]) == ("right", False)
    assert [engine["id"] for engine in second["engines"]] == ["e-right"]
    assert (await two.api.http.get("/cluster", params={"model": "none"})).status_code == 404


async def test_limits_on_requests_in_flight_apply_to_each_model(chatml: Path, right_model: Path) -> None:
    async with (
        FakeEngine("e-left", model="left", vocab_size=LEFT_VOCAB, manual=True) as left,
        FakeEngine("e-right", model="right", vocab_size=RIGHT_VOCAB) as right,
    ):
        further = FurtherModelConfig(
            model=ModelConfig(path=str(right_model), served_model_name="right"), engines=(right.address,)
        )
        model = ModelConfig(path=str(chatml), served_model_name="left")
        limits = LimitsConfig(max_requests=1)
        server = ServerConfig(host="127.0.0.1", port=0)
        async with openai_server(model, engines=[left.address], models=(further,), limits=limits, server=server) as api:
            running = api.server.generate(model="left")
            await eventually(lambda: left.requests)
            assert (await failure(api.server.generate(model="left"))).code == "RESOURCE_EXHAUSTED"
            await api.server.outputs(model="right", max_tokens=1)
            assert (await api.http.get("/health")).status_code == 200  # the other model still has room
            running.cancel()
