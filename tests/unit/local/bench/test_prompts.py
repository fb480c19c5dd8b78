"""Prompts of files: which there are, and what is said of files that have none."""

import json
from pathlib import Path
from typing import Any

import pytest

from penstock_common.errors import ConfigError
from penstock_local.bench.prompts import read_prompts


def conversation(*turns: tuple[str, str]) -> dict[str, Any]:
    return {"id": "x", "conversations": [{"from": speaker, "value": value} for speaker, value in turns]}


def written(folder: Path, content: Any) -> Path:
    file = folder / "ShareGPT.json"
    file.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return file


def test_conversations_give_what_people_say_first(tmp_path: Path) -> None:
    conversations = [
        conversation(("human", "Hello"), ("gpt", "Hi"), ("human", "More")),
        conversation(("gpt", "Hi"), ("human", "no")),
        conversation(),
        conversation(("user", "Größe\n?")),
        conversation(("human", " ")),
    ]
    lines = read_prompts(written(tmp_path, conversations))
    assert [(line.prompt, line.max_tokens) for line in lines] == [("Hello", None), ("Größe\n?", None)]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[", "it is no list of conversations"),
        ({"a": 1}, "it is no list of conversations"),
        ([{"conversations": [{"from": "human"}]}], "it is no list of conversations"),
        ([], "no conversation begins with what a person says"),
        ([conversation(("gpt", "Hi"))], "no conversation begins with what a person says"),
    ],
)
def test_a_file_without_conversations_is_refused(tmp_path: Path, content: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=f"--prompts .*ShareGPT.json: {message}"):
        read_prompts(written(tmp_path, content))
