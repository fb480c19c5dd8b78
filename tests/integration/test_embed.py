"""Embed, Classify and Score through a real frontend and a real engine: results equal sentence-transformers' results."""

import shutil
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from sentence_transformers import CrossEncoder, SentenceTransformer
from transformers import AutoTokenizer

from penstock.common.v1 import pooling_pb2, tensor_pb2
from penstock.inference.v1 import messages_pb2 as pb
from penstock_common.errors import InvalidArgument, NotFound
from penstock_common.rpc.outputs import vectors_from_proto
from penstock_enginecore.config import CacheConfig, EngineCoreConfig, ExecutorConfig, LoraConfig, ModelConfig
from penstock_enginecore.executor.uniproc import UniprocExecutor
from penstock_frontend.config import HttpConfig, LimitsConfig
from tests.fakes.engines.engine_server import EngineServer
from tests.fakes.frontends.frontend_server import FrontendServer, failure
from tests.fakes.models.pooling_models import MINILM, assert_close, save_pooling_model, tensor
from tests.fakes.patience import PATIENCE

TEXTS = [
    "A cat sits on the mat.",
    "Ein Text.",
    "The sea is deep, and nobody has ever seen all of its ground. " * 8,
    "hello",
    "A dog lies on the rug.",
]
LABELS = {0: "sad", 1: "glad", 2: "neither"}


@contextmanager
def serving(path: Path, *, lora: Mapping[str, Any] | None = None, **model: Any) -> Iterator[str]:
    """Yield the address of an engine with the model at ``path``."""
    config = EngineCoreConfig(
        model=ModelConfig(path=str(path), served_model_name="model", device="cpu", **model),
        cache=CacheConfig(num_blocks=64),
        executor=ExecutorConfig(num_threads=1),
        lora=LoraConfig(**(lora or {})),
    )
    server = EngineServer(config, UniprocExecutor(config)).start()
    try:
        yield server.load().address
    finally:
        server.stop()


@asynccontextmanager
async def frontend_of(path: Path, address: str, **options: Any) -> AsyncIterator[FrontendServer]:
    http = HttpConfig(host="127.0.0.1", port=0)
    async with FrontendServer(path, engines=[address], http=http, **options) as server:
        await server.until_health(serving=True)
        yield server


def texts(*values: str) -> list[pb.PoolingInput]:
    return [pb.PoolingInput(text=value) for value in values]


async def post(server: FrontendServer, path: str, body: Any) -> Any:
    """Return the answer of the HTTP API."""
    url = f"http://127.0.0.1:{server.frontend.http_port}"
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE, verify=False) as client:
        response = await client.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


def read(message: tensor_pb2.Tensor) -> torch.Tensor:
    return tensor(vectors_from_proto(message))


@pytest.fixture(scope="module")
def minilm() -> SentenceTransformer:
    return SentenceTransformer(str(MINILM), device="cpu")


@pytest.fixture(scope="module")
def minilm_engine() -> Iterator[str]:
    with serving(MINILM) as address:
        yield address


@pytest.fixture
async def embedding(minilm_engine: str) -> AsyncIterator[FrontendServer]:
    async with frontend_of(MINILM, minilm_engine, limits=LimitsConfig(max_pooling_inputs=8)) as server:
        yield server


def make_classifier(folder: Path, head: str, **config: Any) -> Path:
    """Write a tiny BERT classifier with MiniLM's tokenizer."""
    save_pooling_model("bert", folder, head=head, vocab_size=30522, pad_token_id=0, **config)
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.txt"):
        shutil.copy(MINILM / name, folder / name)
    return folder


async def test_vectors_equal_those_of_sentence_transformers(
    embedding: FrontendServer, minilm: SentenceTransformer
) -> None:
    response = await embedding.stub.Embed(pb.EmbedRequest(inputs=texts(*TEXTS), request_id="mine"))
    expected = torch.from_numpy(minilm.encode(TEXTS))
    assert_close([read(e) for e in response.embeddings], list(expected))
    assert response.request_id == "mine"
    assert response.usage.prompt_tokens == sum(len(minilm.tokenizer(text)["input_ids"]) for text in TEXTS)


async def test_token_ids_are_embedded_as_they_are(embedding: FrontendServer, minilm: SentenceTransformer) -> None:
    ids = minilm.tokenizer(TEXTS[0])["input_ids"]
    inputs = [pb.PoolingInput(token_ids=pb.TokenIds(ids=ids)), *texts(TEXTS[0])]
    response = await embedding.stub.Embed(pb.EmbedRequest(inputs=inputs))
    first, second = (read(e) for e in response.embeddings)
    assert_close([first], [second])


async def test_dimensions_and_normalization_are_the_clients_choice(
    embedding: FrontendServer, minilm: SentenceTransformer
) -> None:
    params = pooling_pb2.PoolingParams(dimensions=32, normalize=True)
    response = await embedding.stub.Embed(pb.EmbedRequest(inputs=texts(*TEXTS), pooling_params=params))
    expected = torch.from_numpy(minilm.encode(TEXTS))[:, :32]
    assert_close([read(e) for e in response.embeddings], list(expected / expected.norm(dim=1, keepdim=True)))


async def test_a_long_text_is_cut_where_that_is_asked_for(
    embedding: FrontendServer, minilm: SentenceTransformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "A cat sits on the mat, " * 1000  # so long that the frontend would refuse the text before tokenizing
    body = {"input": text, "use_activation": True}
    all_there_is_room_for = await post(embedding, "/v1/embeddings", {**body, "truncate_prompt_tokens": -1})
    eight = await post(embedding, "/v1/embeddings", {**body, "truncate_prompt_tokens": 8})
    vectors = [torch.tensor(answer["data"][0]["embedding"]) for answer in (all_there_is_room_for, eight)]
    expected = [torch.from_numpy(minilm.encode(text))]
    monkeypatch.setattr(minilm, "max_seq_length", 8)
    assert_close(vectors, [*expected, torch.from_numpy(minilm.encode(text))])
    assert eight["usage"]["prompt_tokens"] == 8


async def test_a_token_task_gives_a_vector_per_token(embedding: FrontendServer, minilm: SentenceTransformer) -> None:
    params = pooling_pb2.PoolingParams(task=pooling_pb2.POOLING_TASK_TOKEN_EMBED, normalize=False)
    response = await embedding.stub.Embed(pb.EmbedRequest(inputs=texts(*TEXTS[:2]), pooling_params=params))
    expected = [minilm.encode(text, output_value="token_embeddings") for text in TEXTS[:2]]
    assert_close([read(e) for e in response.embeddings], expected, atol=3e-5)


async def test_a_bi_encoder_scores_with_the_cosine(embedding: FrontendServer, minilm: SentenceTransformer) -> None:
    (query,) = texts(TEXTS[0])
    response = await embedding.stub.Score(pb.ScoreRequest(query=query, documents=texts(*TEXTS[1:])))
    vectors = torch.from_numpy(minilm.encode(TEXTS))
    assert list(response.scores) == pytest.approx((vectors[1:] @ vectors[0]).tolist(), abs=1e-5)
    assert max(response.scores) == response.scores[3]
    body = {"queries": [TEXTS[0], TEXTS[1]], "items": [TEXTS[4], TEXTS[3]]}
    scored = await post(embedding, "/score", body)
    expected = [float(vectors[0] @ vectors[4]), float(vectors[1] @ vectors[3])]
    assert [each["score"] for each in scored["data"]] == pytest.approx(expected, abs=1e-5)


async def test_the_model_says_what_it_serves(embedding: FrontendServer) -> None:
    response = await embedding.stub.ListModels(pb.ListModelsRequest())
    assert list(response.models[0].capabilities) == ["embed", "token_embed"]
    assert response.models[0].max_model_len == 256


async def test_generating_with_an_embedding_model_is_refused(embedding: FrontendServer) -> None:
    error = await failure(embedding.generate())
    assert isinstance(error, InvalidArgument)
    assert (error.field, error.reason) == ("model", "WRONG_MODEL_KIND")
    assert error.message == "the model does not generate; it supports embed, token_embed"


async def test_classifying_with_an_embedding_model_is_refused(embedding: FrontendServer) -> None:
    error = await failure(embedding.stub.Classify(pb.ClassifyRequest(inputs=texts("x"))))
    assert isinstance(error, InvalidArgument)
    assert (error.field, error.reason) == ("model", "WRONG_MODEL_KIND")
    assert error.message == "the model does not support classify; it supports embed, token_embed"


@pytest.mark.parametrize(
    ("request_fields", "field", "message"),
    [
        ({}, "inputs", "inputs is empty: there is nothing to compute"),
        ({"inputs": texts(*"123456789")}, "inputs", "inputs has 9 entries; limits.max_pooling_inputs is 8"),
        ({"inputs": texts("x", "")}, "inputs[1].text", "inputs[1].text is empty: there is nothing to compute"),
        ({"inputs": [pb.PoolingInput()]}, "inputs[0]", "inputs[0] is not set: give text, token_ids or mixed"),
        (
            {"inputs": texts("x", "a " * 255)},
            "inputs[1].text",
            "inputs[1].text is 257 tokens; max_model_len is 256",
        ),
        (
            {"inputs": [pb.PoolingInput(token_ids=pb.TokenIds(ids=[5, 30522]))]},
            "inputs[0].token_ids.ids",
            "inputs[0].token_ids.ids[1] is 30522; it must be below the vocabulary size, 30522",
        ),
        (
            {"inputs": texts("x"), "pooling_params": pooling_pb2.PoolingParams(dimensions=385)},
            "pooling_params.dimensions",
            "pooling_params.dimensions is 385; it must be at least 1 and at most 384",
        ),
        (
            {"inputs": texts("x"), "pooling_params": pooling_pb2.PoolingParams(use_activation=True)},
            "pooling_params.use_activation",
            "pooling_params.use_activation is True, but it has no meaning for this call; leave it unset",
        ),
        (
            {"inputs": texts("x"), "pooling_params": pooling_pb2.PoolingParams(task=2)},
            "pooling_params.task",
            "pooling_params.task is CLASSIFY; this call supports EMBED, TOKEN_EMBED and SPARSE_EMBED",
        ),
    ],
)
async def test_errors_name_the_input_the_value_and_the_limit(
    embedding: FrontendServer, request_fields: dict[str, Any], field: str, message: str
) -> None:
    error = await failure(embedding.stub.Embed(pb.EmbedRequest(**request_fields)))
    assert isinstance(error, InvalidArgument)
    assert (error.field, error.message) == (field, message)


async def test_another_model_is_not_found(embedding: FrontendServer) -> None:
    error = await failure(embedding.stub.Embed(pb.EmbedRequest(model="other", inputs=texts("x"))))
    assert isinstance(error, NotFound)


async def test_classes_are_transformers_and_named(tmp_path: Path) -> None:
    path = make_classifier(tmp_path, "ForSequenceClassification", id2label=LABELS)
    model = save_pooling_model(
        "bert", tmp_path / "again", head="ForSequenceClassification", vocab_size=30522, pad_token_id=0, id2label=LABELS
    )
    tokenizer = AutoTokenizer.from_pretrained(MINILM)
    short = [text for text in TEXTS if len(text) < 50]
    with torch.inference_mode():
        expected = [model(**tokenizer(text, return_tensors="pt")).logits[0].softmax(dim=-1) for text in short]
    with serving(path) as address:
        async with frontend_of(path, address) as server:
            response = await server.stub.Classify(pb.ClassifyRequest(inputs=texts(*short)))
            by_http = await post(server, "/classify", {"input": short})
            pooled = await post(server, "/pooling", {"input": short, "use_activation": False})
    assert_close([torch.tensor(list(s.probabilities)) for s in response.scores], expected)
    assert [s.label for s in response.scores] == [LABELS[int(e.argmax())] for e in expected]
    assert [each["probs"] for each in by_http["data"]] == [list(s.probabilities) for s in response.scores]
    assert [each["label"] for each in by_http["data"]] == [s.label for s in response.scores]
    assert {each["num_classes"] for each in by_http["data"]} == {len(LABELS)}
    assert by_http["usage"]["prompt_tokens"] == response.usage.prompt_tokens
    assert_close([torch.tensor(each["data"]).softmax(dim=-1) for each in pooled["data"]], expected)


async def test_token_classes_are_a_tensor_per_input(tmp_path: Path) -> None:
    path = make_classifier(tmp_path, "ForTokenClassification", num_labels=4)
    params = pooling_pb2.PoolingParams(task=pooling_pb2.POOLING_TASK_TOKEN_CLASSIFY)
    with serving(path) as address:
        async with frontend_of(path, address) as server:
            response = await server.stub.Classify(pb.ClassifyRequest(inputs=texts("hello"), pooling_params=params))
    probabilities = read(response.scores[0].token_probabilities)
    assert probabilities.shape == (3, 4)
    assert_close([probabilities.sum(dim=1)], [torch.ones(3)])
    assert list(response.scores[0].probabilities) == []


async def test_a_cross_encoder_reads_both_texts_at_once(tmp_path: Path) -> None:
    path = make_classifier(tmp_path, "ForSequenceClassification", num_labels=1)
    (query,) = texts("A cat.")
    documents = ["A dog lies on the rug.", "hello", "A cat sits on the mat."]
    pairs = [("A cat.", document) for document in documents]
    expected = CrossEncoder(str(path), device="cpu").predict(pairs)
    of_eight = CrossEncoder(str(path), device="cpu", max_length=8).predict(pairs)
    with serving(path) as address:
        async with frontend_of(path, address) as server:
            response = await server.stub.Score(pb.ScoreRequest(query=query, documents=texts(*documents)))
            ranking = await post(server, "/v1/rerank", {"query": "A cat.", "documents": documents, "top_n": 2})
            scored = await post(server, "/v1/score", {"text_1": ["A cat."] * 3, "text_2": documents})
            bare = await post(server, "/score", {"data_1": "A cat.", "data_2": documents, "use_activation": False})
            cut = await post(
                server, "/score", {"queries": "A cat.", "documents": documents, "truncate_prompt_tokens": 8}
            )
            refused = await failure(
                server.stub.Score(
                    pb.ScoreRequest(query=pb.PoolingInput(token_ids=pb.TokenIds(ids=[1])), documents=texts("x"))
                )
            )
    assert list(response.scores) == pytest.approx(expected.tolist(), abs=1e-5)
    assert [each["score"] for each in cut["data"]] == pytest.approx(of_eight.tolist(), abs=1e-5)
    assert len(set(response.scores)) == 3
    best = sorted(range(3), key=lambda index: -response.scores[index])[:2]
    assert [(r["index"], r["document"]["text"]) for r in ranking["results"]] == [(i, documents[i]) for i in best]
    assert [r["relevance_score"] for r in ranking["results"]] == [response.scores[index] for index in best]
    assert [each["score"] for each in scored["data"]] == list(response.scores)
    assert torch.sigmoid(torch.tensor([each["score"] for each in bare["data"]])).tolist() == pytest.approx(
        expected.tolist(), abs=1e-5
    )
    assert refused.message == "query.token_ids.ids is set, but this model is a cross-encoder, which scores only texts"
