"""Conversations of a ShareGPT file: selected ones, lengths of their answers, and errors for other files."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from penstock_client import Model
from penstock_common.errors import ConfigError
from penstock_local.bench.dataset import Prompt, sharegpt
from penstock_local.bench.options import BenchOptions

MODEL = Model(name="m", max_model_len=1500, num_engines=1, vocab_size=300)


async def count_words(text: str) -> int:
    return len(text.split())


def conversation(*lengths: int) -> dict[str, Any]:
    """Return a conversation with turns of these numbers of words. Each word consists of all the lengths, to identify
    it.
    """
    name = "-".join(map(str, lengths))
    turns = [
        {"from": side, "value": " ".join([name] * n)} for side, n in zip(itertools.cycle(("human", "gpt")), lengths)
    ]
    return {"id": name, "conversations": turns}


def written(folder: Path, content: Any) -> Path:
    file = folder / "ShareGPT.json"
    file.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return file


async def asked(file: Path, count: int, **options: Any) -> list[Prompt]:
    """Return the first prompts of a load with this number of requests."""
    given = BenchOptions(address="x", dataset="sharegpt", dataset_path=str(file), requests=count, warmup=0, **options)
    dataset = await sharegpt(given, MODEL, count_words)
    return list(itertools.islice(dataset.prompts, count))


async def test_conversations_are_left_out_by_their_lengths(tmp_path: Path) -> None:
    fit = [(4, 4), (1024, 4), (4, 1496), (1000, 500, 9)]
    others = [(3, 9), (9, 3), (1025, 4), (4, 1497), (9,), ()]
    file = written(tmp_path, [conversation(*lengths) for lengths in [*fit, *others]] + [{"id": "empty"}])
    prompts = await asked(file, len(fit))
    assert sorted((len(str(prompt.text).split()), prompt.max_tokens) for prompt in prompts) == sorted(
        lengths[:2] for lengths in fit
    )


async def test_the_seed_chooses_and_too_few_conversations_come_again(tmp_path: Path) -> None:
    file = written(tmp_path, [conversation(5 + n, 10) for n in range(20)])
    first, same, other = [await asked(file, 30, bench_seed=seed) for seed in (1, 1, 2)]
    assert first == same != other
    assert first[:10] == first[20:]
    assert len({prompt.text for prompt in first}) == 20


async def test_an_output_length_that_is_given_stands_for_the_answers(tmp_path: Path) -> None:
    file = written(tmp_path, [conversation(5, 1)])
    assert [prompt.max_tokens for prompt in await asked(file, 2, output_len="7")] == [7, 7]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[\n{},\n", ", line 3: not a list of conversations: Input data was truncated"),
        ({"a": 1}, ": not a list of conversations: Expected `array`, got `object`"),
        (
            [conversation(5, 5), {"conversations": [{"from": "human"}]}],
            ", entry 2: Object missing required field `value` - at `\\$.conversations\\[0\\]`",
        ),
        ([], ": none of the file's 0 entries has two turns"),
        ([conversation(5)], ": none of the file's 1 entries has two turns"),
        (
            [conversation(3, 9)],
            ": none of the file's 1 conversations fits: prompts have 4 to 1024 tokens, .* at most 1500",
        ),
    ],
)
async def test_a_file_without_conversations_is_refused(tmp_path: Path, content: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=f"--dataset-path .*ShareGPT.json{message}"):
        await asked(written(tmp_path, content), 1)


async def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--dataset-path: cannot read '.*none.json': No such file"):
        await asked(tmp_path / "none.json", 1)
