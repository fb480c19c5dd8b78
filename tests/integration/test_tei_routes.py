"""TEI's routes and the model's own prompts, with an engine without a model: forms of requests and answers, and errors."""

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.enginecore.v1 import messages_pb2 as pb
from tests.fakes.models.small_tokenizers import save_model
from tests.integration.test_openai_pooling import ids_of, post, rows_of, serving

PROMPTS = {"prompts": {"query": "find: ", "document": ""}, "default_prompt_name": None}


@pytest.fixture(scope="module")
def prompted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory of a model that has prompts."""
    path = save_model(tmp_path_factory.mktemp("models") / "model")
    (path / "config_sentence_transformers.json").write_text(json.dumps(PROMPTS), encoding="utf-8")
    return path


def last(request: pb.EngineCoreRequest) -> list[float]:
    return [float(request.prompt_token_ids[-1]), 0.25]


async def test_embed_answers_with_vectors(model: Path) -> None:
    async with serving(model, "embed", "token_embed", vectors=last) as (api, engine):
        assert await post(api, "/embed", {"inputs": [[5, 6], [7]]}) == [[6.0, 0.25], [7.0, 0.25]]
        assert await post(api, "/embed", {"inputs": "ab", "normalize": False, "truncate": True, "dimensions": 2})
        normalized = [request.pooling_params.normalize for request in engine.requests]
        assert normalized == [True, True, False]
    async with serving(model, "token_embed", vectors=rows_of) as (api, engine):
        assert await post(api, "/embed_all", {"inputs": [5, 6]}) == [[[5.0, 0.5], [6.0, 0.5]]]
        assert not engine.requests[0].pooling_params.normalize


async def test_a_ranking_of_texts_has_teis_form(model: Path) -> None:
    best = ids_of("abcd")[-1]
    async with serving(model, "score", vectors=lambda r: [0.75 if r.prompt_token_ids[-1] == best else 0.25]) as (
        api,
        engine,
    ):
        body = {"query": "q", "texts": ["ab", "abcd"], "raw_scores": True}
        assert await post(api, "/rerank", body) == [{"index": 1, "score": 0.75}, {"index": 0, "score": 0.25}]
        assert {request.pooling_params.use_activation for request in engine.requests} == {False}
        answer = await post(api, "/rerank", {**body, "return_text": True, "top_n": 1})
        assert answer == [{"index": 1, "text": "abcd", "score": 0.75}]


async def test_predict_sorts_the_classes_of_texts_and_pairs(model: Path) -> None:
    async with serving(model, "classify", vectors=lambda r: [0.25, 0.75]) as (api, engine):
        classes = [{"score": 0.75, "label": "LABEL_1"}, {"score": 0.25, "label": "LABEL_0"}]
        assert await post(api, "/predict", {"inputs": "a"}) == classes
        assert await post(api, "/predict", {"inputs": ["a", "b"], "raw_scores": True}) == classes
        assert await post(api, "/predict", {"inputs": [["a"], ["b"]]}) == [classes, classes]
        assert await post(api, "/predict", {"inputs": [["a", "b"]]}) == [classes]
        pairs = [request.HasField("second_text_start") for request in engine.requests]
        assert pairs == [False, True, False, False, True]
        assert engine.requests[1].pooling_params.use_activation is False


async def test_similarity_compares_sentences(model: Path) -> None:
    async with serving(model, "score", vectors=lambda r: [0.5]) as (api, _):
        body = {"inputs": {"source_sentence": "a", "sentences": ["b", "c"]}}
        assert await post(api, "/similarity", body) == [0.5, 0.5]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/embed", {}, "inputs"),
        ("/embed", {"inputs": []}, "inputs"),
        ("/embed", {"inputs": list("abcd")}, "inputs"),
        ("/embed", {"inputs": "a", "dimensions": 0}, "dimensions"),
        ("/embed", {"inputs": "a", "prompt_name": "query"}, "prompt_name"),
        ("/predict", {"inputs": []}, "inputs"),
        ("/predict", {"inputs": list("abc")}, "inputs"),
        ("/predict", {"inputs": [["a"], ["b", "c"]]}, "inputs"),
        ("/predict", {"inputs": [["a"], []]}, "inputs[1]"),
        ("/similarity", {"inputs": {"source_sentence": "a", "sentences": []}}, "inputs.sentences"),
        ("/similarity", {"inputs": {"source_sentence": "a", "sentences": ["b", ""]}}, "inputs.sentences[1]"),
        ("/rerank", {"query": "a", "texts": []}, "texts"),
        ("/rerank", {"query": "a", "texts": ["b"], "documents": ["b"]}, "texts"),
    ],
    ids=str,
)
async def test_a_wrong_field_is_named(model: Path, path: str, body: Any, param: str) -> None:
    async with serving(model, "embed", "classify", "score", vectors=lambda r: [0.5]) as (api, _):
        response = await api.http.post(path, json=body)
        assert (response.status_code, response.json()["error"]["param"]) == (400, param)


async def test_a_prompt_stands_before_each_text(prompted: Path) -> None:
    async with serving(prompted, "embed", vectors=last) as (api, engine):
        await post(api, "/v1/embeddings", {"input": ["ab", "c"], "prompt_name": "query"})
        await post(api, "/v1/embeddings", {"input": "ab", "input_type": "search_query"})
        await post(api, "/v1/embeddings", {"input": "ab", "input_type": "document"})
        await post(api, "/embed", {"inputs": "ab", "prompt_name": "query"})
        await post(api, "/v1/embeddings", {"input": "ab"})
        texts = ["find: ab", "find: c", "find: ab", "ab", "find: ab", "ab"]
        assert [list(request.prompt_token_ids) for request in engine.requests] == [ids_of(text) for text in texts]
        response = await api.http.post("/v1/embeddings", json={"input": [5, 6], "prompt_name": "query"})
        assert response.json()["error"]["param"] == "input"
        body = {"messages": [{"role": "user", "content": "a"}], "prompt_name": "query"}
        response = await api.http.post("/v1/embeddings", json=body)
        assert response.json()["error"]["param"] == "prompt_name"


async def test_the_default_prompt_is_for_texts_without_another(tmp_path: Path) -> None:
    path = save_model(tmp_path / "model")
    content = {**PROMPTS, "default_prompt_name": "query"}
    (path / "config_sentence_transformers.json").write_text(json.dumps(content), encoding="utf-8")
    async with serving(path, "embed", vectors=last) as (api, engine):
        await post(api, "/v1/embeddings", {"input": "ab"})
        await post(api, "/v1/embeddings", {"input": "ab", "prompt_name": "document"})
        await post(api, "/v1/embeddings", {"input": [5, 6]})
        assert [list(r.prompt_token_ids) for r in engine.requests] == [ids_of("find: ab"), ids_of("ab"), [5, 6]]
        response = await api.http.post("/v1/embeddings", json={"input": ""})
        assert response.status_code == 400
