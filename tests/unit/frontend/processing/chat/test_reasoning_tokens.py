"""Reasoning tokens are counted to the token, however an output is cut into pieces."""

from collections.abc import Sequence

import pytest

from penstock_common.types.request import ReasoningTokens
from penstock_frontend.processing.chat.answers import CountByParser, CountToEndToken, ReasoningTokenCount
from penstock_frontend.processing.parsers.gpt_oss import GptOssReasoningParser

TEXTS = ["<|channel|>", "analysis", "<|message|>", "one", " two", "<|end|>", "<|start|>", "assistant", "<|channel|>"]
TEXTS += ["final", "<|message|>", "three", " four"]


def by_parser() -> ReasoningTokenCount:
    return CountByParser(GptOssReasoningParser(""), TEXTS.__getitem__)


def counted(count: ReasoningTokenCount, pieces: Sequence[Sequence[int]]) -> int:
    for number, piece in enumerate(pieces, 1):
        count.push(piece, reasoning=True, ended=number == len(pieces))
    return count.total


@pytest.mark.parametrize("pieces", [[[7, 1, 2, 3, 8, 4, 8, 5]], [[7], [1, 2], [3, 8, 4], [8, 5]]])
def test_tokens_count_up_to_the_one_that_ends_the_reasoning(pieces: list[list[int]]) -> None:
    assert counted(CountToEndToken(ReasoningTokens(7, 8)), pieces) == 5


def test_an_answer_that_does_not_reason_counts_nothing() -> None:
    count = CountToEndToken(ReasoningTokens(7, 8))
    count.push([1, 2, 3], reasoning=False, ended=True)
    assert count.total == 0


@pytest.mark.parametrize("size", [1, 2, 3, 7, 100])
def test_tags_of_several_tokens_count_before_the_reasoning_and_not_behind_it(size: int) -> None:
    ids = list(range(len(TEXTS)))
    pieces = [ids[start : start + size] for start in range(0, len(ids), size)]
    assert counted(by_parser(), pieces) == 5  # three tokens of the tag, and two words


def test_reasoning_that_is_cut_off_counts() -> None:
    assert counted(by_parser(), [[0, 1, 2, 3, 4]]) == 5
    assert counted(by_parser(), [[11, 12]]) == 0
