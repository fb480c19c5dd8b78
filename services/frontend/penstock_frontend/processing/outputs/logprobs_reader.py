"""Log-probabilities as clients read them: each entry with its text, and none twice."""

from penstock_common.types.outputs import Logprobs
from penstock_common.types.sampling import SamplingParams
from penstock_frontend.processing.prompts.tokenizer import Tokenizer


class LogprobsReader:
    """Gives the entries of one sequence their texts; none where the request wants no text.

    The text of an entry is what its token adds behind another one: leading spaces are kept. A token that holds a part of a
    character is U+FFFD, a special token is its name. So the texts of the chosen tokens are the output's text only where
    every character is whole in one token.
    """

    __slots__ = ("_num_prompt_left", "_tokenizer", "_wanted")

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams, num_prompt_tokens: int) -> None:
        self._tokenizer = tokenizer if params.detokenize else None
        self._wanted = params.logprobs is not None
        self._num_prompt_left = num_prompt_tokens - 1 if params.prompt_logprobs is not None else 0

    def read(self, logprobs: Logprobs | None, num_tokens: int) -> Logprobs | None:
        """Those of an output, None when it has no tokens.

        Raises ValueError when they are wanted and not as many as its tokens.
        """
        if not self._wanted:
            return None
        num_positions = 0 if logprobs is None else len(logprobs)
        if num_positions != num_tokens:
            raise ValueError(f"log-probabilities of {num_positions} positions came with {num_tokens} tokens")
        return None if logprobs is None or not num_positions else self._with_texts(logprobs)

    def read_prompt(self, logprobs: Logprobs | None) -> Logprobs | None:
        """Those of further prompt tokens, as many as there still can be; None when none are left."""
        if logprobs is None:
            return None
        count = min(len(logprobs), self._num_prompt_left)
        self._num_prompt_left -= count
        return self._with_texts(logprobs.slice(0, count)) if count else None

    def _with_texts(self, logprobs: Logprobs) -> Logprobs:
        if self._tokenizer is not None:
            text_of = self._tokenizer.text_of
            logprobs.tokens = [text_of(token_id) for token_id in logprobs.token_ids]
        return logprobs
