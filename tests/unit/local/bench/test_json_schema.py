"""Requests for JSON: generated schemas, which engines accept, and schemas from a file."""

import itertools
import json
from pathlib import Path

import jsonschema
import pytest

from penstock_common.errors import ConfigError
from penstock_enginecore.structured_output.constraints.json_schema import schema_grammar
from penstock_enginecore.structured_output.constraints.schema_document import parse
from penstock_local.bench.dataset import Prompt, json_schema
from penstock_local.bench.options import BenchOptions


def asked(count: int, file: str = "", **options: int) -> list[Prompt]:
    given = BenchOptions(address="x", dataset="json-schema", dataset_path=file, **options)
    return list(itertools.islice(json_schema(given).prompts, count))


def test_made_schemas_are_those_of_the_seed_and_come_in_turn() -> None:
    first, again, other = (asked(12, num_schemas=6, bench_seed=seed) for seed in (1, 1, 2))
    assert first == again != other
    assert first[:6] == first[6:]
    assert len({prompt.schema for prompt in first}) == 6
    assert all(prompt.schema in str(prompt.text) and prompt.max_tokens == 512 for prompt in first)


def test_made_schemas_are_such_that_engines_take_them() -> None:
    for prompt in asked(50, num_schemas=50):
        jsonschema.Draft202012Validator.check_schema(json.loads(prompt.schema))
        assert schema_grammar(parse(prompt.schema)).startswith("root ")


def test_a_file_says_prompts_and_lengths_or_leaves_them(tmp_path: Path) -> None:
    file = tmp_path / "schemas.jsonl"
    file.write_text(
        '{"schema": {"type": "integer"}, "prompt": "A number:", "max_tokens": 3}\n\n{"schema": {"const": 1}}\n'
    )
    first, second, third = asked(3, str(file))
    assert first == third == Prompt("A number:", 3, '{"type": "integer"}')
    assert (second.schema, second.max_tokens) == ('{"const": 1}', 512)
    assert '{"const": 1}' in str(second.text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("\n", ": the file has no schemas"),
        ('{"schema": {}}\n{"prompt": "x"}', ", line 2: Object missing required field `schema`"),
        ("{", ", line 1: Input data was truncated"),
        (
            '{"schema": {"properties": {"a": {"type": "text"}}}}',
            r", line 1: schema: \$\.properties\.a.*'text' is not valid",
        ),
        ('{"schema": {}, "prompt": ""}', ", line 1: the prompt is empty"),
        ('{"schema": {}, "max_tokens": 0}', ", line 1: max_tokens is 0; it must be at least 1"),
    ],
)
def test_a_wrong_line_is_named(text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "schemas.jsonl"
    file.write_text(text)
    with pytest.raises(ConfigError, match=f"--dataset-path .*schemas.jsonl{message}"):
        asked(1, str(file))
