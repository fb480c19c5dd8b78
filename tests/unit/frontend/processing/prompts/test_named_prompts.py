"""Prompts in the files of sentence-transformers."""

import json
from pathlib import Path
from typing import Any

import pytest

from penstock_common.errors import ConfigError, InvalidArgument
from penstock_frontend.config import ModelConfig
from penstock_frontend.processing.prompts.named_prompts import NamedPrompts, load_prompts

PROMPTS = NamedPrompts({"query": "query: ", "passage": "passage: ", "clustering": "topic: "})


@pytest.mark.parametrize(
    ("prompt_name", "input_type", "text"),
    [
        (None, None, None),
        ("query", None, "query: "),
        ("clustering", None, "topic: "),
        (None, "search_query", "query: "),
        (None, "QUERY", "query: "),
        (None, "search_document", "passage: "),
        (None, "document", "passage: "),
        (None, "clustering", "topic: "),
        (None, "classification", ""),
    ],
)
def test_a_request_selects_a_prompt(prompt_name: str | None, input_type: str | None, text: str | None) -> None:
    assert PROMPTS.text(prompt_name, input_type) == text


def test_a_model_without_prompts_accepts_every_kind_of_input() -> None:
    assert NamedPrompts().text(None, "search_query") == ""


@pytest.mark.parametrize(
    ("prompts", "fields", "message"),
    [
        (PROMPTS, ("title", None), "prompt_name is 'title', which the model does not have: its prompts are 'query', "),
        (NamedPrompts(), ("query", None), "which the model does not have: it has no prompts"),
        (PROMPTS, (None, "image"), "input_type is 'image'; known: query, search_query"),
        (PROMPTS, ("query", "query"), "prompt_name and input_type are both set; set only one of them"),
    ],
)
def test_other_names_are_refused(prompts: NamedPrompts, fields: Any, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        prompts.text(*fields)


def test_prompts_are_read_from_the_models_directory(tmp_path: Path) -> None:
    config = ModelConfig(path=str(tmp_path))
    assert load_prompts(config) == NamedPrompts()
    content = {"prompts": {"query": "query: ", "document": ""}, "default_prompt_name": "query"}
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps(content), encoding="utf-8")
    prompts = load_prompts(config)
    assert prompts == NamedPrompts({"query": "query: ", "document": ""}, "query")
    assert prompts.default_text == "query: "


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"prompts": ["query: "]}, "prompts must be an object whose values are texts"),
        ({"prompts": {"query": 5}}, "prompts must be an object whose values are texts"),
        ({"prompts": {}, "default_prompt_name": "query"}, "default_prompt_name is 'query', but prompts has no such"),
    ],
)
def test_a_broken_file_is_refused(content: Any, message: str, tmp_path: Path) -> None:
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(ConfigError, match=message):
        load_prompts(ModelConfig(path=str(tmp_path)))
