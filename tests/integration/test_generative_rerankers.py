"""Scores of a model that generates, with an engine without a model: pairs are written by the model's chat template."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.models.small_tokenizers import save_model
from tests.integration.test_openai_pooling import TOKENIZER, post, serving

TEMPLATE = (
    "{% for message in messages %}[{{ message.role }}]{{ message.content }}{% endfor %}"
    "{% if strict is defined %} strict={{ strict }}{% endif %}?"
)
"""A template that writes messages of all roles."""


def reranker(folder: Path, template: str | None = TEMPLATE, **files: Any) -> Path:
    """Return a directory of a generative reranker with more ``files`` of JSON."""
    path = save_model(folder / "model")
    files = {"config": {"architectures": ["Qwen3ForCausalLM"]}} | files
    for name, content in files.items():
        (path / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    if template is not None:
        (path / "chat_template.jinja").write_text(template, encoding="utf-8")
    return path


def ids_of(text: str) -> list[int]:
    """Return the ids of a rendered prompt. The template writes special tokens itself."""
    return TOKENIZER.encode(text, add_special_tokens=False).ids


def prompts_of(engine: Any) -> list[list[int]]:
    return [list(request.prompt_token_ids) for request in engine.requests]


async def test_each_pair_is_one_prompt_of_the_template(tmp_path: Path) -> None:
    async with serving(reranker(tmp_path), "score", vectors=lambda r: [len(r.prompt_token_ids) / 100]) as (api, engine):
        answer = await post(api, "/rerank", {"query": "q", "documents": ["a", "bcd"]})
        assert [each["index"] for each in answer["results"]] == [1, 0]
        answer = await post(api, "/score", {"queries": ["q", "r"], "documents": ["a", "b"]})
        assert len(answer["data"]) == 2
        texts = ["[query]q[document]a?", "[query]q[document]bcd?", "[query]q[document]a?", "[query]r[document]b?"]
        assert prompts_of(engine) == [ids_of(text) for text in texts]
        assert not any(request.HasField("second_text_start") for request in engine.requests)


async def test_the_models_prompt_is_the_system_message(tmp_path: Path) -> None:
    files = {
        "config_sentence_transformers": {"prompts": {"web": "find it"}, "default_prompt_name": "web"},
        "sentence_bert_config": {"processing_kwargs": {"chat_template": {"strict": 1, "restore_suffix": True}}},
    }
    async with serving(reranker(tmp_path, **files), "score", vectors=lambda r: [0.5]) as (api, engine):
        await post(api, "/score", {"queries": "q", "documents": "a"})
        assert prompts_of(engine) == [ids_of("[system]find it[query]q[document]a strict=1?")]


@pytest.mark.parametrize(
    ("template", "fields", "param", "message"),
    [
        ("{{ messages[-1].content }}", {}, "model", "does not write messages with the roles query and document"),
        (None, {}, "messages", "the model has no chat template"),
        (TEMPLATE, {"truncate_prompt_tokens": 5}, "truncate_prompt_tokens", "pairs of texts cannot be truncated"),
        ("{{ raise_exception('no') }}", {}, "messages", "refuses the messages: no"),
    ],
    ids=str,
)
async def test_what_cannot_be_scored_is_refused(
    template: str | None, fields: dict[str, Any], param: str, message: str, tmp_path: Path
) -> None:
    async with serving(reranker(tmp_path, template), "score", vectors=lambda r: [0.5]) as (api, engine):
        body = {"query": "q", "documents": ["a"], **fields}
        response = await api.http.post("/rerank", json=body)
        error = response.json()["error"]
        assert (response.status_code in (400, 501), error["param"]) == (True, param), response.text
        assert message in error["message"]
        assert not engine.requests


async def test_another_cross_encoder_reads_pairs_as_before(tmp_path: Path) -> None:
    files = {"config": {"architectures": ["Qwen3ForSequenceClassification"]}}
    async with serving(reranker(tmp_path, **files), "score", vectors=lambda r: [0.5]) as (api, engine):
        await post(api, "/score", {"queries": "q", "documents": "a"})
        assert [request.HasField("second_text_start") for request in engine.requests] == [True]
