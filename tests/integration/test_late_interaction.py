"""Late-interaction models from text to scores: embeddings and scores equal those of sentence-transformers, for the files of
Stanford's ColBERT, of PyLate and of sentence-transformers.
"""

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from sentence_transformers import MultiVectorEncoder

from penstock.common.v1 import pooling_pb2
from penstock.inference.v1 import messages_pb2 as pb
from penstock_common.errors import ConfigError
from penstock_frontend.config import ModelConfig
from penstock_frontend.processing.prompts.late_interaction import LateInteraction, Marker, load_late_interaction
from penstock_frontend.processing.prompts.tokenizer import load_model_files
from tests.fakes.models.pooling_models import MINILM, assert_close, save_pooling_model, write_json
from tests.fakes.models.small_tokenizers import save_model
from tests.integration.test_embed import frontend_of, post, read, serving, texts
from tests.integration.test_openai_pooling import post as ask
from tests.integration.test_openai_pooling import rows_of
from tests.integration.test_openai_pooling import serving as serving_rows
from tests.integration.test_token_heads import DIM, save_colbert, save_dense, weights

QUERIES = ["Where does the cat sleep?", "rug"]
DOCUMENTS = ["A cat sleeps (always) on the mat, at noon.", "hello", "A dog, a rug; and more: dots..."]


def with_tokenizer(directory: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.txt"):
        shutil.copy(MINILM / name, directory / name)


def stanford(directory: Path) -> None:
    save_colbert("bert", directory, vocab_size=30522, pad_token_id=0)
    with_tokenizer(directory)
    metadata = {"query_token_id": "[unused0]", "doc_token_id": "[unused1]", "query_maxlen": 16, "doc_maxlen": 60}
    write_json(directory / "artifact.metadata", metadata | {"attend_to_mask_tokens": False})


def pylate(directory: Path, **settings: Any) -> None:
    save_pooling_model("bert", directory, vocab_size=30522, pad_token_id=0)
    with_tokenizer(directory)
    save_dense(directory / "1_Dense", {"linear.weight": weights(DIM, 24)})
    kinds = {"": "sentence_transformers.models.Transformer", "1_Dense": "pylate.models.Dense.Dense"}
    listed = [{"idx": i, "name": str(i), "path": path, "type": kind} for i, (path, kind) in enumerate(kinds.items())]
    write_json(directory / "modules.json", listed)
    write_json(directory / "sentence_bert_config.json", {"max_seq_length": 59, "do_lower_case": False})
    given = {"query_prefix": "[unused5]", "document_prefix": "say ", "query_length": 20, "document_length": 60}
    given |= {"do_query_expansion": True, "attend_to_expansion_tokens": True, "model_type": "ColBERT"}
    write_json(directory / "config_sentence_transformers.json", given | settings)


def native(directory: Path) -> None:
    """Write a model that sentence-transformers has saved, which expands queries to at least 8 tokens."""
    pylate(directory / "older", do_query_expansion=False, skiplist_words=[",", "hello"])
    model = MultiVectorEncoder(str(directory / "older"), device="cpu")
    transformer: Any = model[0]
    transformer.query_expansion = {"strategy": "min", "attend": False, "length": 8}
    model.save(str(directory))


FORMS: Mapping[str, Callable[[Path], None]] = {"stanford": stanford, "pylate": pylate, "sentence-transformers": native}


@pytest.mark.parametrize("form", FORMS)
async def test_embeddings_and_scores_equal_those_of_sentence_transformers(form: str, tmp_path: Path) -> None:
    FORMS[form](tmp_path)
    model = MultiVectorEncoder(str(tmp_path), device="cpu")
    queries: Any = model.encode_query(QUERIES)
    documents: Any = model.encode_document(DOCUMENTS)
    expected = model.similarity(queries, documents)
    token_embed = pooling_pb2.PoolingParams(task=pooling_pb2.POOLING_TASK_TOKEN_EMBED)
    with serving(tmp_path) as address:
        async with frontend_of(tmp_path, address) as server:
            asked = await post(server, "/pooling", {"input": QUERIES, "input_type": "query"})
            stored = await server.stub.Embed(
                pb.EmbedRequest(inputs=texts(*DOCUMENTS), pooling_params=token_embed, input_type="document")
            )
            every = await post(server, "/embed_all", {"inputs": "hello"})
            ranking = await post(server, "/rerank", {"query": QUERIES[0], "documents": DOCUMENTS})
            scores = await post(server, "/score", {"queries": [QUERIES[1]] * 3, "documents": DOCUMENTS})
            by_grpc = await server.stub.Score(pb.ScoreRequest(query=texts(QUERIES[0])[0], documents=texts(*DOCUMENTS)))
    assert_close([torch.tensor(each["data"]) for each in asked["data"]], queries)
    assert_close([read(each) for each in stored.embeddings], documents)
    assert len(every[0]) == 3  # without input_type, a text has no marker, and every token has an embedding
    ranked = {each["index"]: each["relevance_score"] for each in ranking["results"]}
    assert_close([torch.tensor([ranked[i] for i in range(3)])], [expected[0]], atol=1e-4)
    assert_close([torch.tensor([each["score"] for each in scores["data"]])], [expected[1]], atol=1e-4)
    assert_close([torch.tensor(list(by_grpc.scores))], [expected[0]], atol=1e-4)
    assert ranking["usage"]["prompt_tokens"] == by_grpc.usage.prompt_tokens
    assert [each["relevance_score"] for each in ranking["results"]] == sorted(ranked.values(), reverse=True)


def settings_of(directory: Path) -> LateInteraction | None:
    config = ModelConfig(path=str(directory))
    return load_late_interaction(config, load_model_files(config, num_threads=1).tokenizer)


async def test_long_texts_are_kept_or_truncated_to_the_models_lengths(tmp_path: Path) -> None:
    path, pylate_files = save_model(tmp_path / "model"), tmp_path / "pylate"
    pylate(
        pylate_files, do_query_expansion=False, query_prefix="", document_prefix="", query_length=8, document_length=10
    )
    for name in ("modules.json", "config_sentence_transformers.json"):
        shutil.copy(pylate_files / name, path / name)
    long = "one two three four five six seven eight nine ten eleven twelve"

    def rows(request: Any) -> list[list[float]]:
        return [[float(i), 1.0] for i in request.prompt_token_ids]

    async with serving_rows(path, "token_embed", vectors=rows) as (api, engine):
        for extra in ({}, {"truncate_prompt_tokens": -1}, {"truncate_prompt_tokens": 6}):
            await ask(api, "/score", {"queries": long, "documents": long, **extra})
        lengths = [len(request.prompt_token_ids) for request in engine.requests]
        assert lengths[0] == lengths[1] > 10
        assert lengths[2:] == [8, 10, 6, 6]


def test_expansion_fills_queries_up_to_the_models_maximum() -> None:
    late = LateInteraction(query=Marker(token_id=7), expansion_length=6, expansion_id=9)
    assert late.encoded([1, 5, 2], is_query=True, max_len=96) == ([1, 7, 5, 2, 9, 9], 4)
    assert late.encoded([1, 5, 2], is_query=True, max_len=5) == ([1, 7, 5, 2, 9], 4)
    assert late.encoded([1, 5, 6, 3, 4, 2], is_query=True, max_len=96) == ([1, 7, 5, 6, 3, 4, 2], None)
    assert late.encoded([1, 5, 2], is_query=False, max_len=96) == ([1, 5, 2], None)


async def test_sums_use_every_token_of_long_documents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock_frontend.calls.scoring.PRODUCTS_PER_TURN", 8)
    pylate(tmp_path, do_query_expansion=False, query_prefix="", document_prefix="", skiplist_words=[])

    def rows(request: Any) -> list[list[float]]:
        return [[i / 1000, -i / 2000] for i in request.prompt_token_ids]

    async with serving_rows(tmp_path, "token_embed", vectors=rows) as (api, _):
        body = {"queries": [[5, 6]], "documents": [[7], [9, 2, 3, 1, 8]]}
        answer = await ask(api, "/score", body)
        best = [[(i * j) * 1.25e-6 for j in document] for document in ([7], [9, 2, 3, 1, 8]) for i in (5, 6)]
        wanted = [max(best[0]) + max(best[1]), max(best[2]) + max(best[3])]
        assert [each["score"] for each in answer["data"]] == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize("path", ["/score", "/rerank"])
async def test_raw_scores_of_late_interaction_are_refused(path: str, tmp_path: Path) -> None:
    pylate(tmp_path)
    async with serving_rows(tmp_path, "token_embed", vectors=rows_of) as (api, _):
        body = {"queries": "a", "query": "a", "documents": ["b"], "use_activation": False}
        body.pop("query" if path == "/score" else "queries")
        answer = await ask(api, path, body, status=400)
        assert answer["error"]["param"] == "use_activation"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"skiplist_words": "abc"}, "skiplist"),
        ({"query_length": -3}, "lengths"),
        ({"document_length": "x"}, "lengths"),
    ],
)
def test_wrong_settings_are_refused(settings: Any, message: str, tmp_path: Path) -> None:
    pylate(tmp_path, **settings)
    with pytest.raises(ConfigError, match=message):
        settings_of(tmp_path)


def test_other_models_have_no_late_interaction() -> None:
    assert settings_of(MINILM) is None


async def test_sparse_embeddings_are_indices_and_values(tmp_path: Path) -> None:
    pylate(tmp_path)
    (tmp_path / "modules.json").unlink()
    entries = {5: [[5.0, 7.0], [0.5, 0.25]], 6: [[], []]}
    async with serving_rows(
        tmp_path, "embed", "sparse_embed", vectors=lambda request: entries[request.prompt_token_ids[0]]
    ) as (api, engine):
        found = [{"index": 5, "value": 0.5}, {"index": 7, "value": 0.25}]
        assert await ask(api, "/embed_sparse", {"inputs": [[5], [6]]}) == [found, []]
        answer = await ask(api, "/pooling", {"input": [[5], [6]], "task": "sparse_embed"})
        assert [each["data"] for each in answer["data"]] == [entries[5], entries[6]]
        for name, value in (("dimensions", 2), ("normalize", True)):
            answer = await ask(api, "/pooling", {"input": [5], "task": "sparse_embed", name: value}, status=400)
            assert answer["error"]["param"] == name
        assert {request.pooling_params.task for request in engine.requests} == {pooling_pb2.POOLING_TASK_SPARSE_EMBED}
    async with serving_rows(tmp_path, "embed", vectors=lambda request: [1.0]) as (api, _):
        answer = await ask(api, "/embed_sparse", {"inputs": "a"}, status=400)
        assert "does not support sparse_embed" in answer["error"]["message"]
