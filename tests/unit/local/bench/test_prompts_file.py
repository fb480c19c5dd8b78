"""Prompts from the user's own file."""

from pathlib import Path

import pytest

from penstock_common.errors import ConfigError
from penstock_local.bench.dataset import prompts_file
from penstock_local.bench.options import BenchOptions


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"prompt": 3}', "line 1: Expected"),
        ("not json", "line 1: JSON is malformed"),
        ('{"prompt": ""}', "line 1: the prompt is empty"),
        ("\n", "the file has no prompts"),
    ],
)
def test_a_wrong_line_of_a_jsonl_file_is_named(text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message):
        prompts_file(BenchOptions(address="x", prompts=str(file)))
