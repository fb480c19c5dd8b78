"""Tokens to text, one token at a time, without ever splitting a character."""

from collections.abc import Sequence

from penstock_frontend.processing.prompts.tokenizer import Tokenizer

REPLACEMENT = "\ufffd"
_CONTEXT_TOKENS = 6
"""Prompt tokens that give the first output tokens their context (leading spaces depend on it)."""
_MAX_CONTEXT = 32
_MAX_PENDING = 8
"""Longest run of undecodable tokens kept together; a character spans at most four."""


class IncrementalDetokenizer:
    """Decodes a growing output.

    A decoder is not a map from token to text: spaces depend on the neighbours, and a character may be spread over several
    tokens, which decode to U+FFFD until the last of them is there. So a short window of tokens is decoded anew with every
    token (the prefix-offset scheme known from text-generation-inference): ``window[:read]`` is text already returned,
    kept as context, and what lies behind it is returned once it does not end in U+FFFD. What was returned is never
    changed. The text of all calls together is what decoding all tokens at once gives, for decoders that work byte by
    byte (byte-level BPE).

    Decoders that put a space between any two tokens (word pieces) put one between special tokens too, unless
    ``spaces_between_special_tokens`` is False. Others never do.
    """

    __slots__ = ("_after_special", "_decode", "_joined", "_known", "_read", "_skipped", "_window")

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int],
        *,
        skip_special_tokens: bool,
        spaces_between_special_tokens: bool = True,
    ) -> None:
        self._decode = tokenizer.decode
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._joined = frozenset() if spaces_between_special_tokens else tokenizer.special_ids - self._skipped
        self._after_special = False
        tail = prompt_token_ids[-_CONTEXT_TOKENS:]
        self._window = [token for token in tail if token not in self._skipped]
        self._read = len(self._window)
        self._known = self._decode(self._window).rstrip(REPLACEMENT) if self._window else ""

    @property
    def pending(self) -> bool:
        """Whether the last tokens wait for the rest of their character."""
        return len(self._window) > self._read

    @property
    def num_pending(self) -> int:
        """How many of the last tokens do, those without text aside."""
        return len(self._window) - self._read

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of these tokens alone."""
        return self._decode([token for token in token_ids if token not in self._skipped])

    def push(self, token_id: int) -> str:
        """The text that this token settles; ``""`` for a skipped special token and in the middle of a character."""
        if token_id in self._skipped:
            return ""
        if not self._joined:
            return self._grow(token_id)
        after_special, self._after_special = self._after_special, token_id in self._joined
        text = self._grow(token_id)
        return text.removeprefix(" ") if after_special and self._after_special else text

    def flush(self) -> str:
        """What was held back, at the end of the output: an unfinished character comes out as U+FFFD."""
        return self._settle(self._decode(self._window)) if self.pending else ""

    def _grow(self, token_id: int) -> str:
        self._window.append(token_id)
        text = self._decode(self._window)
        if not text.endswith(REPLACEMENT):
            return self._settle(text)
        return self._split_pending(text) if len(self._window) - self._read > _MAX_PENDING else ""

    def _settle(self, text: str) -> str:
        new = text[len(self._known) :]
        if new:
            del self._window[: self._read]
            self._known = self._decode(self._window)
        elif len(self._window) > _MAX_CONTEXT:
            self._window.pop()  # tokens without text may come without end
        self._read = len(self._window)
        return new

    def _split_pending(self, text: str) -> str:
        """Undecodable tokens may come without end: let go of those in front that later ones cannot change any more."""
        for end in range(len(self._window) - 1, len(self._window) - 5, -1):
            front = self._decode(self._window[:end])
            if front + self._decode(self._window[end:]) == text:
                new = front[len(self._known) :]
                del self._window[:end]
                self._read, self._known = 0, ""
                return new
        return ""
