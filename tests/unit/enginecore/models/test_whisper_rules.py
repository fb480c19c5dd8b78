"""Reading of Whisper's rules from generation_config.json."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig, WhisperConfig

from penstock_enginecore.config import ModelConfig
from penstock_enginecore.models.errors import ModelLoadError
from penstock_enginecore.models.whisper_rules import WhisperRules, read_whisper_rules

VOCAB = 51865
TINY = {
    "begin_suppress_tokens": [220, 50257],
    "bos_token_id": 50257,
    "decoder_start_token_id": 50258,
    "eos_token_id": 50257,
    "is_multilingual": True,
    "max_initial_timestamp_index": 50,
    "no_timestamps_token_id": 50363,
    "suppress_tokens": [1, 2, 50358, 50359],
    "task_to_id": {"transcribe": 50359, "translate": 50358},
}


def read(directory: Path, values: Any, vocab: int = VOCAB, **config: Any) -> WhisperRules | None:
    if values is not None:
        (directory / "generation_config.json").write_text(values if isinstance(values, str) else json.dumps(values))
    return read_whisper_rules(ModelConfig(path=str(directory)), WhisperConfig(**config), vocab)


def test_the_rules_are_those_of_the_file(tmp_path: Path) -> None:
    assert read(tmp_path, TINY) == WhisperRules(
        suppressed=(1, 2, 50358, 50359),
        suppressed_first=(220, 50257),
        no_timestamps=50363,
        max_first_timestamp=50,
        end=50257,
        start=50258,
        tasks=(50359, 50358),
        multilingual=True,
    )
    assert read_whisper_rules(ModelConfig(path=str(tmp_path)), LlamaConfig(), VOCAB) is None


@pytest.mark.parametrize(
    ("change", "field", "value"),
    [
        ({"max_initial_timestamp_index": None}, "max_first_timestamp", None),
        ({"suppress_tokens": None}, "suppressed", ()),
        ({"suppress_tokens": []}, "suppressed", ()),
        ({"begin_suppress_tokens": None}, "suppressed_first", ()),
        ({"task_to_id": None}, "tasks", ()),
        ({"is_multilingual": False, "task_to_id": None}, "multilingual", False),
        ({"is_multilingual": None}, "multilingual", True),
        ({"eos_token_id": [50257]}, "end", 50257),
        ({"eos_token_id": None, "bos_token_id": 50256}, "end", 50256),
        ({"decoder_start_token_id": 50260}, "start", 50260),
    ],
)
def test_absent_values_are_those_of_transformers(
    tmp_path: Path, change: dict[str, Any], field: str, value: object
) -> None:
    rules = read(tmp_path, {name: each for name, each in (TINY | change).items() if each is not None})
    assert getattr(rules, field) == value
    assert read(tmp_path, TINY | change) == rules


def test_without_the_token_of_no_timestamps_there_are_none(tmp_path: Path) -> None:
    rules = read(tmp_path, {"suppress_tokens": [5]})
    assert rules == WhisperRules(suppressed=(5,))
    assert read(tmp_path, {}) is None


def test_without_the_file_suppressed_tokens_are_those_of_config_json(tmp_path: Path) -> None:
    assert read(tmp_path, None) == WhisperRules(suppressed_first=(220, 50256))
    assert read(tmp_path, None, vocab=200) is None, "defaults outside the vocabulary suppress nothing"
    assert read(tmp_path, None, vocab=300, suppress_tokens=[7]) == WhisperRules((7,), (220,))


def test_a_file_that_transformers_made_of_config_json_is_no_choice_of_the_author(tmp_path: Path) -> None:
    made = {"_from_model_config": True, "begin_suppress_tokens": [220, 50256]}
    assert read(tmp_path, made, vocab=200) is None
    assert read(tmp_path, made, vocab=300) == WhisperRules(suppressed_first=(220,))


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"suppress_tokens": [1, VOCAB]}, r"suppress_tokens\[1\] is 51865; it must be a token id from 0 to 51864"),
        ({"suppress_tokens": [-1]}, r"suppress_tokens\[0\] is -1; it must be a token id"),
        ({"suppress_tokens": "1"}, r"suppress_tokens is '1'; it must be a list of token ids"),
        ({"begin_suppress_tokens": [True]}, r"begin_suppress_tokens\[0\] is True; it must be a token id"),
        ({"begin_suppress_tokens": [2.5]}, r"begin_suppress_tokens\[0\] is 2\.5; it must be a token id"),
        (
            {"no_timestamps_token_id": VOCAB - 1},
            "no_timestamps_token_id is 51864; it must be a token id from 0 to 51863",
        ),
        ({"no_timestamps_token_id": "x"}, "no_timestamps_token_id is 'x'; it must be a token id"),
        ({"max_initial_timestamp_index": -1}, "max_initial_timestamp_index is -1; it must be an integer of at least 0"),
        ({"eos_token_id": [1, 2]}, r"eos_token_id is \[1, 2\]; it must be a token id"),
        ({"eos_token_id": None, "bos_token_id": None}, "bos_token_id is missing; it must be a token id"),
        ({"decoder_start_token_id": None}, "decoder_start_token_id is missing; it must be a token id"),
        ({"task_to_id": [1]}, r"task_to_id is \[1\]; it must be an object"),
        ({"task_to_id": {"transcribe": -3}}, r"task_to_id\['transcribe'\] is -3; it must be a token id"),
    ],
)
def test_values_that_no_rule_can_have_are_refused(tmp_path: Path, change: dict[str, Any], error: str) -> None:
    with pytest.raises(ModelLoadError, match=error) as raised:
        read(tmp_path, TINY | change)
    assert str(tmp_path / "generation_config.json") in str(raised.value)


@pytest.mark.parametrize(("text", "error"), [("[]", "must contain a JSON object"), ("{", "cannot be read")])
def test_files_that_are_no_objects_are_refused(tmp_path: Path, text: str, error: str) -> None:
    with pytest.raises(ModelLoadError, match=error):
        read(tmp_path, text)
