"""What a model's reasoning stands between: told to the engines, which let a constraint hold behind it."""

from typing import NamedTuple

from penstock_common.observability.logging import get_logger
from penstock_common.types.request import ReasoningTokens
from penstock_frontend.processing.parsers.base import ReasoningParser
from penstock_frontend.processing.prompts.tokenizer import Tokenizer


class Reasoning(NamedTuple):
    """How a model reasons. ``tokens``: of the parser's tags."""

    parser: type[ReasoningParser]
    tokens: ReasoningTokens


def reasoning_of(parser: type[ReasoningParser] | None, tokenizer: Tokenizer) -> Reasoning | None:
    """How a model with this parser reasons; None without a parser, and where a tag is no token of its own."""
    if parser is None:
        return None
    begin, end = (tokenizer.token_id(tag) for tag in parser.tags)
    if begin is None or end is None:
        get_logger().warning("schemas hold in the reasoning, too: its tags are no tokens", tags=list(parser.tags))
        return None
    return Reasoning(parser, ReasoningTokens(begin, end))
