"""Embed, Classify and Score with adapters, through a real frontend and a real engine: results equal PEFT's results."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from sentence_transformers import SentenceTransformer
from transformers import AutoModel, AutoTokenizer

from penstock.inference.v1 import messages_pb2 as pb
from penstock_frontend.config import LoraConfig
from tests.fakes.frontends.frontend_server import FrontendServer
from tests.fakes.models.adapters import load_adapter, save_adapter
from tests.fakes.models.pooling_models import MINILM, assert_close, save_pooling_model
from tests.integration.test_embed import TEXTS, frontend_of, make_classifier, post, read, serving, texts

ATOL = 1e-4
SETTINGS: dict[str, dict[str, Any]] = {"small": {"r": 4, "lora_alpha": 16}, "large": {"r": 64, "lora_alpha": 128}}
NAMES = ("", *SETTINGS)
pytestmark = pytest.mark.slow


@asynccontextmanager
async def adapted(
    model: Any, path: Path, folder: Path, **settings: Any
) -> AsyncIterator[tuple[FrontendServer, dict[str, Any]]]:
    """Yield a server of the checkpoint at ``path`` with adapters, and PEFT's models by adapter name.

    The name "" means the base model.
    """
    models = {"": model}
    for seed, (name, own) in enumerate(SETTINGS.items()):
        save_adapter(model, folder / name, seed=seed, task_type=None, **{**own, **settings})
        models[name] = load_adapter(model, folder / name)
    lora = LoraConfig(adapters={name: str(folder / name) for name in SETTINGS})
    with serving(path, lora={"max_loras": len(SETTINGS)}) as address:
        async with frontend_of(path, address, lora=lora) as server:
            yield server, models


async def test_vectors(tmp_path: Path) -> None:
    minilm = SentenceTransformer(str(MINILM), device="cpu")
    base = AutoModel.from_pretrained(MINILM, dtype=torch.float32).eval()
    async with adapted(base, MINILM, tmp_path) as (server, models):
        expected = {}
        for name, model in models.items():
            minilm[0].model = model
            expected[name] = torch.from_numpy(minilm.encode(TEXTS))
        assert float((expected["small"] - expected[""]).abs().max()) > 0.01
        asked = [server.stub.Embed(pb.EmbedRequest(inputs=texts(*TEXTS), lora=name)) for name in NAMES * 4]
        for name, answer in zip(NAMES * 4, await asyncio.gather(*asked), strict=True):
            assert_close([read(each) for each in answer.embeddings], list(expected[name]), atol=ATOL)
        for name in SETTINGS:
            for body in ({"model": name}, {"lora": name}):
                answer = await post(server, "/v1/embeddings", {"input": TEXTS, **body})
                vectors = [torch.tensor(each["embedding"]) for each in answer["data"]]
                assert_close(vectors, list(expected[name]), atol=ATOL)
            (query,) = texts(TEXTS[0])
            scored = await server.stub.Score(pb.ScoreRequest(query=query, documents=texts(*TEXTS[1:]), lora=name))
            assert list(scored.scores) == pytest.approx((expected[name][1:] @ expected[name][0]).tolist(), abs=ATOL)


async def test_classes(tmp_path: Path) -> None:
    path = make_classifier(tmp_path / "model", "ForSequenceClassification", num_labels=3)
    settings = {"vocab_size": 30522, "pad_token_id": 0, "num_labels": 3}
    model = save_pooling_model("bert", tmp_path / "again", head="ForSequenceClassification", **settings)
    tokenizer, short = AutoTokenizer.from_pretrained(MINILM), [text for text in TEXTS if len(text) < 50]
    async with adapted(model, path, tmp_path, exclude_modules=["classifier"]) as (server, models):
        asked = [server.stub.Classify(pb.ClassifyRequest(inputs=texts(*short), lora=name)) for name in NAMES * 4]
        answers = await asyncio.gather(*asked)
        for name, answer in zip(NAMES * 4, answers, strict=True):
            with torch.inference_mode():
                logits = [models[name](**tokenizer(text, return_tensors="pt")).logits[0] for text in short]
            expected = [each.softmax(dim=-1) for each in logits]
            assert_close([torch.tensor(list(each.probabilities)) for each in answer.scores], expected, atol=ATOL)
            by_http = await post(server, "/classify", {"input": short, **({"lora": name} if name else {})})
            assert_close([torch.tensor(each["probs"]) for each in by_http["data"]], expected, atol=ATOL)
        assert len({tuple(answer.scores[0].probabilities) for answer in answers}) == len(NAMES)


async def test_pairs(tmp_path: Path) -> None:
    path = make_classifier(tmp_path / "model", "ForSequenceClassification", num_labels=1)
    settings = {"vocab_size": 30522, "pad_token_id": 0, "num_labels": 1}
    model = save_pooling_model("bert", tmp_path / "again", head="ForSequenceClassification", **settings)
    tokenizer, documents = AutoTokenizer.from_pretrained(MINILM), ["A dog lies on the rug.", "hello", "A cat sits."]
    (query,) = texts("A cat.")
    async with adapted(model, path, tmp_path, exclude_modules=["classifier"]) as (server, models):
        for name in NAMES:
            with torch.inference_mode():
                pairs = [tokenizer("A cat.", document, return_tensors="pt") for document in documents]
                expected = [float(models[name](**pair).logits[0].sigmoid()) for pair in pairs]
            answer = await server.stub.Score(pb.ScoreRequest(query=query, documents=texts(*documents), lora=name))
            assert list(answer.scores) == pytest.approx(expected, abs=ATOL)
            body = {"query": "A cat.", "documents": documents, **({"lora": name} if name else {})}
            ranking = await post(server, "/v1/rerank", body)
            found = {each["index"]: each["relevance_score"] for each in ranking["results"]}
            assert [found[index] for index in range(len(documents))] == pytest.approx(expected, abs=ATOL)
