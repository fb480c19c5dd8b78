"""What a model's reasoning stands between: told to the engines, which let a constraint hold behind it."""

from typing import NamedTuple

from penstock_common.observability.logging import get_logger
from penstock_common.types.request import ReasoningTokens
from penstock_common.types.sampling import SamplingParams
from penstock_frontend.processing.parsers.base import ReasoningParser
from penstock_frontend.processing.prompts.tokenizer import Tokenizer


class Reasoning(NamedTuple):
    """How a model reasons. ``tokens``: of the parser's tags."""

    parser: type[ReasoningParser]
    tokens: ReasoningTokens

    def ended_by(self, prompt: str, params: SamplingParams) -> bool | None:
        """Return whether ``prompt`` ends the reasoning (True) or begins it (False); None if the engine must find out. An empty
        prompt is not known as text.
        """
        ended = self.parser.ended_by(prompt) if prompt else None
        # A constraint may begin with the answer, so its engine looks for the tag.
        begins = bool(prompt) and self.parser.always and params.structured_output is None
        return False if ended is None and begins else ended


def reasoning_of(parser: type[ReasoningParser] | None, tokenizer: Tokenizer) -> Reasoning | None:
    """How a model with this parser reasons; None without a parser, and where a tag is no token of its own."""
    if parser is None:
        return None
    begin, end = (tokenizer.token_id(tag) for tag in parser.tags)
    if begin is None or end is None:
        get_logger().warning("schemas hold in the reasoning, too: its tags are no tokens", tags=list(parser.tags))
        return None
    return Reasoning(parser, ReasoningTokens(begin, end))
