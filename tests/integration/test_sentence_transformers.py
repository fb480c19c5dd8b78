"""Embeddings and scores equal those of sentence-transformers, for checkpoints that sentence-transformers has saved."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from sentence_transformers import CrossEncoder, SentenceTransformer
from sentence_transformers.base.modules import Transformer
from sentence_transformers.cross_encoder.modules import LogitScore

from penstock_common.errors import InvalidArgument
from tests.fakes.models.pooling_models import KINDS, MINILM, TWO_WAY
from tests.fakes.models.sentence_checkpoints import (
    LONG,
    MAX_LENGTH,
    PAIRS,
    TEXTS,
    embedded,
    embedding_difference,
    largest_difference,
    save_base,
    save_cross_encoder,
    save_sentence_transformer,
    score_difference,
    scored,
    served,
)

VECTORS, SCORES = 1e-5, 1e-4
"""Largest accepted differences."""
PROMPTS = {"query": "Find documents about: ", "document": "A document. ", "topic": "Find the topic of: "}


@pytest.mark.parametrize("family", [*KINDS, "qwen3"])
def test_each_family_embeds_alike(family: str, tmp_path: Path) -> None:
    assert embedding_difference(family, tmp_path) < VECTORS


def test_a_decoder_that_attends_in_both_directions_embeds_alike(tmp_path: Path) -> None:
    assert embedding_difference("gemma3_text", tmp_path, **TWO_WAY["gemma3_text"]) < VECTORS


@pytest.mark.parametrize("family", ["bert", "roberta", "deberta-v2", "mpnet", "qwen3"])
def test_families_score_pairs_alike(family: str, tmp_path: Path) -> None:
    assert score_difference(family, tmp_path) < SCORES


@pytest.mark.parametrize(
    ("mode", "after"),
    [
        ("cls", []),
        ("max", ["Normalize"]),
        ("lasttoken", ["Normalize"]),
        ("weightedmean", []),
        ("mean_sqrt_len_tokens", ["Dense"]),
        (["cls", "max", "mean"], ["Dense", "Dense", "Normalize"]),
    ],
    ids=str,
)
def test_each_pooling_mode_gives_the_same_vectors(mode: str | list[str], after: list[str], tmp_path: Path) -> None:
    assert embedding_difference("bert", tmp_path, mode=mode, after=after) < VECTORS


def test_texts_are_truncated_at_the_side_of_the_tokenizer(tmp_path: Path) -> None:
    model = save_sentence_transformer("bert", tmp_path, tokenizer={"truncation_side": "left"})
    assert model.tokenizer.truncation_side == "left"
    with served(tmp_path) as llm:
        assert llm.max_model_len == MAX_LENGTH
        [vector] = embedded(llm, [LONG])
    assert largest_difference(vector, model.encode(LONG)) < VECTORS


def test_pairs_are_truncated_at_the_side_of_the_tokenizer(tmp_path: Path) -> None:
    assert score_difference("bert", tmp_path, tokenizer={"truncation_side": "left"}) < SCORES


def test_token_types_that_the_tokenizer_does_not_return_are_not_used(tmp_path: Path) -> None:
    names = ["input_ids", "attention_mask"]
    assert score_difference("bert", tmp_path, tokenizer={"model_input_names": names}) < SCORES


def test_the_activation_of_a_saved_cross_encoder_is_used(tmp_path: Path) -> None:
    expected = save_cross_encoder("bert", tmp_path, activation_fn=torch.nn.Identity()).predict(PAIRS)
    assert min(expected) < 0, "the sigmoid would hide a wrong activation"
    with served(tmp_path) as llm:
        assert largest_difference(scored(llm, PAIRS), expected) < SCORES


def test_prompts_are_added_as_for_queries_and_documents(tmp_path: Path) -> None:
    model = save_sentence_transformer("bert", tmp_path, prompts=PROMPTS, default_prompt="topic")
    query, documents = TEXTS[0], TEXTS[1:]
    of_query, of_documents = model.encode_query([query]), model.encode_document(documents)
    with served(tmp_path) as llm:
        for options, expected in (
            ({}, model.encode(documents)),
            ({"prompt_name": "query"}, model.encode(documents, prompt_name="query")),
            ({"input_type": "passage"}, of_documents),
        ):
            assert largest_difference(embedded(llm, documents, **options), expected) < VECTORS
        pairs = [(query, document) for document in documents]
        assert largest_difference(scored(llm, pairs), of_documents @ of_query[0]) < SCORES
        of_topic = model.encode([query], prompt_name="topic")
        found = scored(llm, pairs, prompt_name="topic")
        with pytest.raises(InvalidArgument, match="its prompts are 'document', 'query', 'topic'"):
            scored(llm, pairs, prompt_name="web")
        with pytest.raises(
            InvalidArgument, match=r"queries\[0\] is not a text, but a prompt can be added only to texts"
        ):
            llm.score([[101, 102]], "x", prompt_name="query", progress=False)
    assert largest_difference(found, of_documents @ of_topic[0]) < SCORES


def test_a_cross_encoder_gets_the_prompt_before_the_query(tmp_path: Path) -> None:
    model = save_cross_encoder("bert", tmp_path, prompts=PROMPTS, default_prompt_name="query")
    with served(tmp_path) as llm:
        assert largest_difference(scored(llm, PAIRS), model.predict(PAIRS)) < SCORES
        expected = model.predict(PAIRS, prompt_name="topic")
        assert largest_difference(scored(llm, PAIRS, prompt_name="topic"), expected) < SCORES


def sentences(count: int) -> list[str]:
    """Return sentences of 1 to 200 words of many kinds."""
    generator = np.random.default_rng(7)
    known = json.loads((MINILM / "tokenizer.json").read_text(encoding="utf-8"))["model"]["vocab"]
    vocabulary = [word for word in known if word.isalpha()]
    odd = ["🎉", "日本語", "naïve", "\t", "İstanbul", "x" * 300, "C++/C#", "...", "\u200b", "3.14", "e\u0301"]
    made = []
    for index in range(count):
        number = int(generator.integers(1, 201)) if index % 4 == 0 else int(generator.integers(1, 12))
        chosen = generator.choice(vocabulary if index % 3 else [*vocabulary[:200], *odd * 20], number)
        made.append(" ".join(map(str, chosen)))
    return made


def test_the_real_minilm_embeds_alike() -> None:
    texts = [*TEXTS, *sentences(40)]
    expected = SentenceTransformer(str(MINILM), device="cpu").encode(texts)
    with served(MINILM) as llm:
        assert largest_difference(embedded(llm, texts), expected) < VECTORS


def test_a_generative_reranker_scores_alike(tmp_path: Path) -> None:
    template = "{% for m in messages %}[{{ m.role }}] {{ m.content }} {% endfor %}answer:"
    save_base("qwen3", tmp_path / "base", {"chat_template": template}, head="ForCausalLM", tie_word_embeddings=False)
    transformer = Transformer(str(tmp_path / "base"), transformer_task="text-generation")
    made = CrossEncoder(modules=[transformer, LogitScore(true_token_id=2748, false_token_id=2053)], device="cpu")
    made.prompts, made.default_prompt_name = dict(PROMPTS), "query"
    made.save_pretrained(str(tmp_path))
    model = CrossEncoder(str(tmp_path), device="cpu")
    pairs = [pair for pair in PAIRS if LONG not in pair]
    with served(tmp_path) as llm:
        found = scored(llm, pairs, truncate_prompt_tokens=None)
        of_topic = scored(llm, pairs, truncate_prompt_tokens=None, prompt_name="topic")
    assert largest_difference(found, model.predict(pairs)) < SCORES
    assert largest_difference(of_topic, model.predict(pairs, prompt_name="topic")) < SCORES
