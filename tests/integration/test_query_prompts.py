"""Prompts of models before queries and documents that are compared, over HTTP and gRPC, with an engine without a model."""

import json
from pathlib import Path
from typing import Any

import pytest

from penstock_client import AsyncClient, InvalidArgument
from tests.fakes.models.small_tokenizers import save_model
from tests.integration.test_generative_rerankers import reranker
from tests.integration.test_openai_pooling import TOKENIZER, ids_of, post, serving

PROMPTS = {"prompts": {"query": "find: ", "passage": "text: ", "topic": "topic: "}, "default_prompt_name": "topic"}


@pytest.fixture(scope="module")
def prompted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory of a model that has prompts."""
    path = save_model(tmp_path_factory.mktemp("models") / "model")
    (path / "config_sentence_transformers.json").write_text(json.dumps(PROMPTS), encoding="utf-8")
    return path


def prompts_of(engine: Any) -> list[list[int]]:
    """Return the prompts that the engine got since the last call."""
    prompts = [list(request.prompt_token_ids) for request in engine.requests]
    engine.requests.clear()
    return prompts


async def test_compared_texts_get_the_prompts_of_queries_and_documents(prompted: Path) -> None:
    async with serving(prompted, "embed", vectors=lambda r: [0.6, 0.8]) as (api, engine):
        for path, body in (
            ("/score", {"text_1": "a", "text_2": ["b", "c"]}),
            ("/rerank", {"query": "a", "documents": ["b", {"text": "c"}]}),
            ("/rerank", {"query": "a", "texts": ["b", "c"]}),
        ):
            await post(api, path, body)
            assert prompts_of(engine) == [ids_of("find: a"), ids_of("text: b"), ids_of("text: c")]
            await post(api, path, {**body, "prompt_name": "topic"})
            assert prompts_of(engine)[0] == ids_of("topic: a")
        await post(api, "/score", {"queries": [5, 6], "documents": [[7], [8]]})
        assert prompts_of(engine) == [[5, 6], [7], [8]]
        refused = await api.http.post("/score", json={"queries": [5, 6], "documents": "b", "prompt_name": "query"})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "queries")


async def test_sentences_that_are_compared_get_one_prompt(prompted: Path) -> None:
    async with serving(prompted, "embed", vectors=lambda r: [0.6, 0.8]) as (api, engine):
        body = {"inputs": {"source_sentence": "a", "sentences": ["b"]}}
        for options, prompt in (
            ({}, "topic: "),
            ({"prompt_name": "query"}, "find: "),
            ({"parameters": {"prompt_name": "query", "truncate": True}}, "find: "),
        ):
            await post(api, "/similarity", {**body, **options})
            assert prompts_of(engine) == [ids_of(f"{prompt}a"), ids_of(f"{prompt}b")]


async def test_pooling_adds_a_prompt_to_texts_that_are_embedded(prompted: Path) -> None:
    async with serving(prompted, "embed", vectors=lambda r: [0.6, 0.8]) as (api, engine):
        await post(api, "/pooling", {"input": "a", "prompt_name": "query"})
        await post(api, "/pooling", {"input": "a", "input_type": "document"})
        assert prompts_of(engine) == [ids_of("find: a"), ids_of("text: a")]


async def test_a_cross_encoder_gets_a_prompt_before_the_query_only(prompted: Path) -> None:
    async with serving(prompted, "score", vectors=lambda r: [0.5]) as (api, engine):
        await post(api, "/score", {"text_1": "a", "text_2": "b"})
        await post(api, "/score", {"text_1": "a", "text_2": "b", "prompt_name": "query"})
        assert prompts_of(engine) == [TOKENIZER.encode(f"{prompt}a", "b").ids for prompt in ("topic: ", "find: ")]


async def test_a_generative_reranker_gets_a_prompt_as_its_instruction(tmp_path: Path) -> None:
    path = reranker(tmp_path, config_sentence_transformers=PROMPTS)
    async with serving(path, "score", vectors=lambda r: [0.5]) as (api, engine):
        await post(api, "/rerank", {"query": "q", "documents": ["a"], "prompt_name": "query"})
        text = "[system]find: [query]q[document]a?"
        assert prompts_of(engine) == [TOKENIZER.encode(text, add_special_tokens=False).ids]


async def test_only_the_first_tokens_of_queries_and_documents_are_read(prompted: Path) -> None:
    body = {"query": "abcd", "documents": ["abcdef", "xy"], "max_tokens_per_doc": 3}
    async with serving(prompted, "score", vectors=lambda r: [0.5]) as (api, engine):
        answer = await post(api, "/v2/rerank", body)
        pairs = [TOKENIZER.encode("topic: abcd", text).ids for text in ("abc", "xy")]
        assert prompts_of(engine) == pairs
        assert [each["document"]["text"] for each in answer["results"]] == ["abcdef", "xy"]
        assert answer["usage"]["prompt_tokens"] == sum(map(len, pairs))
    async with serving(prompted, "embed", vectors=lambda r: [0.6, 0.8]) as (api, engine):
        await post(api, "/v2/rerank", {**body, "max_tokens_per_query": 0})
        assert prompts_of(engine) == [ids_of("find: abcd"), ids_of("text: abc"), ids_of("text: xy")]
        body = {"queries": ["abcd"], "documents": ["abcdef", [5, 6, 7]]}
        await post(api, "/score", {**body, "max_tokens_per_query": 2, "max_tokens_per_doc": 1})
        assert prompts_of(engine) == [ids_of("find: ab"), ids_of("text: a"), [5]]


async def test_embeddings_have_the_form_of_coheres_api(prompted: Path) -> None:
    async with serving(prompted, "embed", vectors=lambda r: [0.5, 0.25]) as (api, engine):
        body = {"model": "model", "texts": ["abcd", "b"], "input_type": "search_query"}
        options = {"embedding_types": ["float", "base64"], "output_dimension": 2, "max_tokens": 4}
        answer = await post(api, "/v2/embed", {**body, **options})
        assert [prompt[:3] for prompt in prompts_of(engine)] == [ids_of("find: abcd")[:3]] * 2
        assert answer["embeddings"] == {"float": [[0.5, 0.25]] * 2, "base64": ["AAAAPwAAgD4="] * 2}
        assert (answer["texts"], answer["response_type"]) == (["abcd", "b"], "embeddings_by_type")
        assert answer["meta"] == {"api_version": {"version": "2"}, "billed_units": {"input_tokens": 8}}
        long = {"model": "model", "texts": ["a" * 500]}
        assert list((await post(api, "/v2/embed", {**long, "max_tokens": 9}))["embeddings"]) == ["float"]
        for wrong, param in (
            ({**long, "truncate": "NONE"}, "texts[0]"),
            ({**body, "embedding_types": ["int8"]}, "embedding_types"),
            ({**body, "images": ["data:"]}, "images"),
            ({**body, "texts": []}, "texts"),
            ({**body, "output_dimension": 0}, "output_dimension"),
            ({**body, "input_type": "image"}, "input_type"),
        ):
            response = await api.http.post("/v2/embed", json=wrong)
            assert (response.status_code in (400, 501), response.json()["error"]["param"]) == (True, param)


async def test_clients_of_the_grpc_api_select_prompts(prompted: Path) -> None:
    async with (
        serving(prompted, "embed", vectors=lambda r: [0.6, 0.8]) as (api, engine),
        AsyncClient(f"127.0.0.1:{api.server.frontend.port}") as client,
    ):
        await client.embed(["a"])
        await client.embed(["a"], prompt_name="query")
        await client.embed(["a"], input_type="search_document")
        assert prompts_of(engine) == [ids_of("topic: a"), ids_of("find: a"), ids_of("text: a")]
        await client.score("a", ["b"])
        await client.score("a", ["b"], prompt_name="topic")
        texts = ["find: a", "text: b", "topic: a", "text: b"]
        assert prompts_of(engine) == [ids_of(text) for text in texts]
        for call, field in (
            (client.embed(["a"], prompt_name="web"), "prompt_name"),
            (client.embed(["a"], prompt_name="query", input_type="query"), "input_type"),
            (client.embed([[5, 6]], prompt_name="query"), "inputs[0].token_ids.ids"),
            (client.score([5, 6], ["b"], prompt_name="query"), "query.token_ids.ids"),
            (client.score("a", ["b"], prompt_name="web"), "prompt_name"),
        ):
            with pytest.raises(InvalidArgument) as refused:
                await call
            assert refused.value.field == field
