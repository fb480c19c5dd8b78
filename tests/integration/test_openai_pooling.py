"""``/v1/score``, ``/rerank``, ``/classify``, ``/pooling`` with an engine without a model: formats and errors.

``test_embed.py`` compares the results with sentence-transformers.
"""

import array
import asyncio
import base64
import importlib.metadata
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
import pytest_asyncio

from penstock.common.v1 import finish_pb2, tensor_pb2
from penstock.enginecore.v1 import messages_pb2 as pb
from penstock_frontend.config import LimitsConfig
from tests.fakes.engines.fake_engine import FakeEngine
from tests.fakes.frontends.frontend_server import eventually
from tests.fakes.frontends.openai_server import OpenAIServer, openai_server
from tests.fakes.models.small_tokenizers import byte_level

TOKENIZER = byte_level()


def ids_of(text: str) -> list[int]:
    return TOKENIZER.encode(text).ids


def rows_of(request: pb.EngineCoreRequest) -> list[list[float]]:
    """Return one row per token."""
    return [[float(token), 0.5] for token in request.prompt_token_ids]


@asynccontextmanager
async def serving(
    model: Path, *capabilities: str, vectors: Callable[[pb.EngineCoreRequest], Any]
) -> AsyncIterator[tuple[OpenAIServer, FakeEngine]]:
    """Yield a frontend in front of an engine that answers every input with the result of ``vectors``.

    The result is a list of numbers, or a list of rows.
    """
    engine = FakeEngine(vocab_size=TOKENIZER.get_vocab_size())
    del engine.ready.capabilities[:]
    engine.ready.capabilities.extend(capabilities)

    def answer(output: pb.EngineCoreOutput) -> pb.EngineCoreOutput:
        found = vectors(engine.take(output.request_id).message)
        per_token = isinstance(found[0], list)
        numbers = [number for row in found for number in row] if per_token else found
        tensor = tensor_pb2.Tensor(
            dtype=tensor_pb2.DATA_TYPE_FLOAT32,
            shape=[len(found), len(found[0])] if per_token else [len(found)],
            inline=array.array("f", numbers).tobytes(),
        )
        return pb.EngineCoreOutput(
            request_id=output.request_id, pooling_output=tensor, finish_reason=finish_pb2.FINISH_REASON_STOP
        )

    engine.mangle = answer
    limits = LimitsConfig(max_pooling_inputs=3)
    async with engine, openai_server(model, engines=[engine.address], limits=limits) as api:
        yield api, engine


async def post(api: OpenAIServer, path: str, body: Any, *, status: int = 200) -> Any:
    response = await api.http.post(path, json=body)
    assert response.status_code == status, response.text
    return response.json()


async def test_a_ranking_has_the_best_first_and_equals_in_their_order(model: Path) -> None:
    best = ids_of("abcd")[-1]
    async with serving(model, "score", vectors=lambda r: [0.75 if r.prompt_token_ids[-1] == best else 0.25]) as (
        api,
        _,
    ):
        documents = ["ab", {"text": "abcd", "title": "is not read"}, "xy"]
        for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
            answer = await post(api, path, {"model": "model", "query": "q", "documents": documents})
            assert answer["results"] == [
                {"index": 1, "document": {"text": "abcd"}, "relevance_score": 0.75},
                {"index": 0, "document": {"text": "ab"}, "relevance_score": 0.25},
                {"index": 2, "document": {"text": "xy"}, "relevance_score": 0.25},
            ]
        body = {"query": {"text": "q"}, "documents": documents, "top_n": 1, "return_documents": False}
        answer = await post(api, "/rerank", body)
        assert answer["results"] == [{"index": 1, "relevance_score": 0.75}]
        assert (answer["id"].startswith("rerank-"), answer["model"]) == (True, "model")
        assert answer["usage"]["total_tokens"] == answer["usage"]["prompt_tokens"] > 0


async def test_classes_are_named_where_the_model_names_them(model: Path) -> None:
    async with serving(model, "classify", vectors=lambda r: [0.25, 0.75]) as (api, engine):
        answer = await post(api, "/classify", {"input": ["a", "b"], "use_activation": False})
        [first, second] = answer["data"]
        assert first == {"index": 0, "label": None, "probs": [0.25, 0.75], "num_classes": 2}
        assert second["index"] == 1
        assert {r.pooling_params.use_activation for r in engine.requests} == {False}


async def test_pooling_gives_rows_per_token_unless_asked_for_something_else(model: Path) -> None:
    async with serving(model, "embed", "token_embed", vectors=rows_of) as (api, _):
        answer = await post(api, "/pooling", {"input": [[5, 6], [7]]})
        assert [each["data"] for each in answer["data"]] == [[[5.0, 0.5], [6.0, 0.5]], [[7.0, 0.5]]]
        assert [each["object"] for each in answer["data"]] == ["pooling", "pooling"]
        text = await post(api, "/pooling", {"input": [5, 6], "encoding_format": "base64"})
        assert list(array.array("f", base64.b64decode(text["data"][0]["data"]))) == [5.0, 0.5, 6.0, 0.5]
    async with serving(model, "embed", vectors=lambda r: [1.0, 2.0]) as (api, _):
        assert (await post(api, "/pooling", {"input": "a"}))["data"][0]["data"] == [1.0, 2.0]


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    ("path", "body", "param", "message"),
    [
        ("/score", {}, "queries", None),
        ("/score", {"queries": "a"}, "documents", "documents is not set"),
        ("/score", {"text_1": "a", "data_2": "b"}, "text_1", None),
        ("/score", {"queries": ["a", "b"], "items": ["c"]}, "queries", None),
        ("/score", {"queries": "a", "documents": []}, "documents", "documents is empty: there is nothing to compute"),
        ("/score", {"queries": [], "documents": "a"}, "queries", "queries is empty: there is nothing to compute"),
        (
            "/score",
            {"text_1": "a", "text_2": ["b", ""]},
            "text_2[1]",
            "text_2[1] is empty: there is nothing to compute",
        ),
        ("/score", {"text_1": "a", "text_2": ["b", 5]}, "text_2[1]", None),
        ("/score", {"text_1": "a", "text_2": "b", "model": "other"}, "model", None),
        ("/score", {"text_1": "a", "text_2": "b", "use_activation": False}, "use_activation", None),
        ("/rerank", {"query": "a"}, "documents", "documents is not set"),
        ("/rerank", {"query": "a", "documents": []}, "documents", "documents is empty: there is nothing to compute"),
        ("/rerank", {"query": "", "documents": ["b"]}, "query", "query is empty: there is nothing to compute"),
        ("/rerank", {"query": "a", "documents": ["b", ""]}, "documents[1]", None),
        ("/rerank", {"query": "a", "documents": list("bcde")}, "documents", None),
        ("/rerank", {"query": "a", "documents": [{"title": "b"}]}, "documents[0].text", None),
        ("/rerank", {"query": "a", "documents": ["b"], "top_n": -1}, "top_n", None),
        ("/rerank", {"query": "a", "documents": ["b"], "max_chunks_per_doc": 2}, "max_chunks_per_doc", None),
        ("/rerank", {"query": "a", "documents": ["b"], "return_embeddings": True}, "return_embeddings", None),
        ("/rerank", {"query": "a", "documents": ["b"], "max_tokens_per_doc": -1}, "max_tokens_per_doc", None),
        ("/rerank", {"query": "a", "documents": ["b"], "prompt_name": "query"}, "prompt_name", None),
        ("/rerank", {"query": "a", "documents": ["b"], "input_type": "query"}, "input_type", None),
        ("/score", {"queries": "a", "documents": "b", "max_tokens_per_query": -1}, "max_tokens_per_query", None),
        ("/classify", {"input": "a", "max_tokens_per_doc": 9}, "max_tokens_per_doc", None),
        ("/pooling", {"input": "a", "task": "classify", "prompt_name": "query"}, "prompt_name", None),
        ("/score", {"queries": "a", "documents": "b", "instruction": "Be kind."}, "instruction", None),
        ("/classify", {"input": "a", "softmax": False}, "softmax", "softmax is not supported; use use_activation"),
        ("/classify", {"input": "a", "truncation_side": "up"}, "truncation_side", None),
        ("/classify", {"input": "a"}, "model", "the model does not support classify; it supports embed"),
        ("/classify", {"messages": []}, "input", "input is not set"),
        ("/classify", {"input": "a", "messages": [{}]}, "messages", "messages is not supported; use input"),
        (
            "/classify",
            {"input": "a", "truncate_prompt_tokens": 1},
            "truncate_prompt_tokens",
            "truncate_prompt_tokens is 1; it must be above 1, the number of special tokens around a text",
        ),
        ("/v1/embeddings", {"input": "a", "truncate_prompt_tokens": -2}, "truncate_prompt_tokens", None),
        ("/v1/embeddings", {"input": "a", "normalize": True, "use_activation": False}, "normalize", None),
        ("/pooling", {"input": "a", "task": "token_embed"}, "model", None),
        ("/pooling", {"input": "a", "task": "plugin"}, "task", None),
        ("/pooling", {"input": "a", "task": "classify", "dimensions": 2}, "dimensions", None),
        ("/pooling", {"input": "a", "encoding_format": "bytes"}, "encoding_format", None),
        ("/pooling", {"input": "a", "data": {"a": 1}}, "data", "data is not supported; use input"),
    ],
    ids=str,
)
async def test_a_wrong_field_is_named(
    shared: OpenAIServer, path: str, body: Any, param: str, message: str | None
) -> None:
    response = await shared.http.post(path, json=body)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (404 if body.get("model") == "other" else 400, param)
    assert message in (None, error["message"])
    assert shared.num_live == 0


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/score", {"queries": "a", "documents": "b"}, "queries"),
        ("/v1/rerank", {"query": "a", "documents": ["b"]}, "query"),
        ("/pooling", {"input": "a"}, "input"),
        ("/tokenize", {"prompt": "a"}, "prompt"),
    ],
)
async def test_the_client_reaches_routes_that_are_not_openais(
    shared: OpenAIServer, path: str, body: dict[str, Any], param: str
) -> None:
    client = shared.client.with_options(base_url=f"http://127.0.0.1:{shared.port}")
    answer: Any = await client.post(path, body={"model": "model", **body}, cast_to=object)
    assert {"data", "results", "tokens"} & answer.keys()
    with pytest.raises(openai.NotFoundError) as missing:
        await client.post(path, body={"model": "other", **body}, cast_to=object)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as wrong:
        await client.post(path, body={**body, param: 5}, cast_to=object)
    assert wrong.value.param == param


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(model: Path) -> AsyncIterator[OpenAIServer]:
    """Yield a server for tests that do not change its state."""
    async with serving(model, "embed", vectors=lambda r: [1.0]) as (api, _):
        yield api


@pytest.mark.parametrize("path", ["/v1/score", "/v1/rerank", "/classify", "/pooling"])
async def test_a_client_that_hangs_up_ends_the_work(model: Path, path: str) -> None:
    engine = FakeEngine(vocab_size=TOKENIZER.get_vocab_size(), manual=True)
    del engine.ready.capabilities[:]
    engine.ready.capabilities.extend(["score", "classify"])
    body = {"input": ["b", "c"], "query": "a", "queries": "a", "documents": ["b", "c"]}
    async with engine, openai_server(model, engines=[engine.address]) as api:
        call = asyncio.create_task(api.http.post(path, json=body))
        await engine.until(lambda e: len(e.running) == 2)
        call.cancel()
        await engine.until(lambda e: not e.running)
        await eventually(lambda: api.num_live == 0)


@pytest.mark.asyncio(loop_scope="module")
async def test_the_version_is_told(shared: OpenAIServer) -> None:
    assert (await shared.http.get("/version")).json() == {"version": importlib.metadata.version("penstock-frontend")}


async def test_ping_is_health(engine: FakeEngine, model: Path) -> None:
    async with openai_server(model, engines=[engine.address]) as api:
        for method in ("GET", "POST"):
            assert (await api.http.request(method, "/ping")).status_code == 200
    async with openai_server(model, engines=["127.0.0.1:1"], wait=False) as api:
        assert (await api.http.get("/ping")).status_code == 503
