"""Conversion of the tokens of a sequence to text, with a search for stop strings. Only text that cannot change any more
is released.
"""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from penstock_common.types.outputs import Logprobs
from penstock_frontend.processing.prompts.tokenizer import Tokenizer

REPLACEMENT = "\ufffd"
_CONTEXT_TOKENS = 6
"""Number of prompt tokens that are decoded together with the first output tokens. The leading spaces of the first output
tokens depend on these prompt tokens.
"""
_MAX_CONTEXT = 32
_MAX_PENDING = 8
"""Maximum number of tokens that wait for the end of an incomplete character. A character has at most four tokens."""


class IncrementalDetokenizer:
    """Decodes an output that grows token by token.

    The text of a token depends on the tokens before and after it, and a character may have several tokens. Such tokens
    decode to U+FFFD until the character is complete. The decoder therefore decodes a short window of the last tokens
    again for every new token (the prefix-offset scheme of text-generation-inference). ``window[:read]`` is context
    whose text was already returned. The text after this context is returned once it does not end in U+FFFD. Returned
    text never changes. For byte-level vocabularies, the joined returned texts equal the text of all tokens decoded
    together.

    Word-piece decoders put a space between any two tokens. These decoders also put a space between special tokens if
    ``spaces_between_special_tokens`` is True. Other decoders never add such spaces.
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
        """Whether the last tokens are the beginning of a character that is not complete yet."""
        return len(self._window) > self._read

    @property
    def num_pending(self) -> int:
        """Number of tokens at the end that are the beginning of a character that is not complete yet."""
        return len(self._window) - self._read

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of these tokens, which are decoded without other tokens as context."""
        return self._decode([token for token in token_ids if token not in self._skipped])

    def push(self, token_id: int) -> str:
        """Add a token, and return the text that this token completes.

        The text is empty for a special token that is skipped, and for a token that does not complete a character.
        """
        if token_id in self._skipped:
            return ""
        if not self._joined:
            return self._grow(token_id)
        after_special, self._after_special = self._after_special, token_id in self._joined
        text = self._grow(token_id)
        return text.removeprefix(" ") if after_special and self._after_special else text

    def flush(self) -> str:
        """Return the remaining text at the end of the output. A character that is still incomplete becomes U+FFFD."""
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
            self._window.pop()  # drop the tokens that have no text, because their number is not limited
        self._read = len(self._window)
        return new

    def _split_pending(self, text: str) -> str:
        """Split the window before one of its last four tokens. Drop the tokens before the split, and return their new
        text.

        The place of the split must not change the text of the window, so that later tokens cannot change the returned
        text. Return an empty text if there is no such place. The split limits the memory for a long sequence of tokens
        that cannot be decoded.
        """
        for end in range(len(self._window) - 1, len(self._window) - 5, -1):
            front = self._decode(self._window[:end])
            if front + self._decode(self._window[end:]) == text:
                new = front[len(self._known) :]
                del self._window[:end]
                self._read, self._known = 0, ""
                return new
        return ""


# The code below searches for the first of several stop strings in a text that arrives in pieces.


class StopMatch(NamedTuple):
    """A stop string that was found. ``end`` is the index after the stop string in the last piece of text."""

    stop: str
    end: int


class StopMatcher:
    """Aho-Corasick automaton that finds stop strings. The automaton's time per character does not depend on the number
    of stop strings.

    The automaton finds the stop string that ends first. If several stop strings end at the same character, it finds the
    longest one. The result therefore does not depend on how the text is split into pieces.
    """

    __slots__ = ("_depth", "_fail", "_found", "_goto", "_state")

    def __init__(self, stops: Sequence[str]) -> None:
        """Build the automaton for the stop strings of a request. ``stops`` must have at least one string, and no string
        may be empty.
        """
        self._goto: list[dict[str, int]] = [{}]
        self._depth = [0]
        self._found: list[str] = [""]
        for stop in stops:
            self._insert(stop)
        self._fail = self._link()
        self._state = 0

    @property
    def partial(self) -> int:
        """Number of characters at the end of the text so far that could be the beginning of a stop string."""
        return self._depth[self._state]

    def feed(self, text: str) -> StopMatch | None:
        """Add the next piece of text.

        Return the first stop string that ends in this piece, or None. The stop string may begin in an earlier piece.
        """
        state, goto, fail, found = self._state, self._goto, self._fail, self._found
        for index, char in enumerate(text):
            while state and char not in goto[state]:
                state = fail[state]
            state = goto[state].get(char, 0)
            if found[state]:
                self._state = 0
                return StopMatch(found[state], index + 1)
        self._state = state
        return None

    def _insert(self, stop: str) -> None:
        state = 0
        for depth, char in enumerate(stop, start=1):
            following = self._goto[state].get(char)
            if following is None:
                following = len(self._goto)
                self._goto[state][char] = following
                self._goto.append({})
                self._depth.append(depth)
                self._found.append("")
            state = following
        self._found[state] = stop

    def _link(self) -> list[int]:
        """Build the failure links in breadth-first order.

        A state that is not the end of a stop string matches the same stop string as the state to which its link leads.
        """
        fail = [0] * len(self._goto)
        queue = deque(self._goto[0].values())
        while queue:
            state = queue.popleft()
            for char, following in self._goto[state].items():
                link = fail[state]
                while link and char not in self._goto[link]:
                    link = fail[link]
                fail[following] = self._goto[link].get(char, 0)
                self._found[following] = self._found[following] or self._found[fail[following]]
                queue.append(following)
        return fail


class TextDelta(NamedTuple):
    """Text that cannot change any more, and the tokens of this text.

    Attributes:
        text: Text that cannot change any more.
        token_ids: Tokens of the text.
        stop: Stop string that ended the output, or ``""``.
        logprobs: Log-probabilities, with one position for each token. None if there are no tokens, or if the request
            did not ask for them.
    """

    text: str = ""
    token_ids: Sequence[int] = ()
    stop: str = ""
    logprobs: Logprobs | None = None


class OutputText:
    """Converts new tokens to output that a client may receive.

    Text is released once it can no longer be part of a stop string. A token is released once all of its text is
    released. The joined pieces of a stream therefore equal the text of the complete output. A stop string cuts off the
    text and the tokens after it. If the output excludes the stop string, the tokens whose text ends before the stop
    string remain. If the output includes the stop string, the tokens up to its end remain. Log-probabilities are
    released together with their tokens.
    """

    __slots__ = (
        "_detokenizer",
        "_ends",
        "_include_stop",
        "_length",
        "_logprobs",
        "_min_tokens",
        "_released",
        "_stops",
        "_text",
        "_tokens",
        "num_tokens",
    )

    def __init__(
        self,
        detokenizer: IncrementalDetokenizer | None,
        *,
        stops: Sequence[str] = (),
        include_stop: bool = False,
        min_tokens: int = 0,
    ) -> None:
        """Create the state of one sequence's output. If there is no detokenizer, the output has no text, and tokens are
        released immediately.
        """
        self._detokenizer = detokenizer
        self._stops = StopMatcher(stops) if stops else None
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._text = ""  # text that is not released yet
        self._tokens: deque[int] = deque()  # tokens that are not released yet
        # log-probabilities of unreleased tokens, and of tokens that were not processed yet
        self._logprobs: Logprobs | None = None
        # position at which the text of each unreleased token ends, as far as it is known
        self._ends: deque[int] = deque()
        self._length = 0  # number of characters of all text so far
        self._released = 0  # number of characters of the released text
        self.num_tokens = 0
        """Number of output tokens so far, including the tokens of a stop string that is cut off."""

    def add(
        self,
        token_ids: Sequence[int],
        *,
        logprobs: Logprobs | None = None,
        ended: bool = False,
        stop_token: bool = False,
    ) -> TextDelta:
        """Add the next tokens with their log-probabilities.

        The caller must not change the log-probabilities afterwards.

        ``ended`` is True for the last tokens. ``stop_token`` is True if the last token is a stop token. A stop token is
        always one of the output's tokens, but its text is in the output's text only if ``include_stop`` is True. Tokens
        after a stop string are dropped.
        """
        if self._detokenizer is None:
            self.num_tokens += len(token_ids)
            return TextDelta(token_ids=token_ids, logprobs=logprobs)
        detokenizer = self._detokenizer
        if not ended and logprobs is None and self._nothing_held():
            return self._add_free(token_ids, detokenizer)
        self._keep(logprobs)
        silent = stop_token and not self._include_stop
        last = len(token_ids) - 1
        for index, token_id in enumerate(token_ids):
            self.num_tokens += 1
            self._tokens.append(token_id)
            text = "" if silent and index == last else detokenizer.push(token_id)
            if (stop := self._grow(text, settled=not detokenizer.pending)) is not None:
                return stop
        if not ended:
            return self._release(self._length - (self._stops.partial if self._stops else 0))
        if (stop := self._grow(detokenizer.flush(), settled=True)) is not None:
            return stop
        return self._release(self._length)

    def _nothing_held(self) -> bool:
        return self._stops is None and not self._tokens and self._logprobs is None

    def _add_free(self, token_ids: Sequence[int], detokenizer: IncrementalDetokenizer) -> TextDelta:
        """Release tokens together with their text, except the tokens of a character that is not complete.

        Most outputs use this fast path.
        """
        text, settled = "", 0
        for number, token_id in enumerate(token_ids, start=1):
            text += detokenizer.push(token_id)
            if not detokenizer.pending:
                settled = number
        self.num_tokens += len(token_ids)
        self._length += len(text)
        self._released = self._length
        if settled == len(token_ids):
            return TextDelta(text, token_ids)
        self._tokens.extend(token_ids[settled:])
        return TextDelta(text, token_ids[:settled])

    def _grow(self, text: str, *, settled: bool) -> TextDelta | None:
        """Add the text of new tokens. If the text completes a stop string, return the final piece of output. Otherwise
        return None.

        ``settled`` is True if the text of every token is complete.
        """
        before = self._length
        self._text += text
        self._length += len(text)
        if settled:
            self._ends.extend([self._length] * (len(self._tokens) - len(self._ends)))
        if self._stops is None or self.num_tokens <= self._min_tokens:
            return None
        match = self._stops.feed(text)
        if match is None:
            return None
        end = before + match.end
        if self._include_stop:
            self._ends = deque([end] * len(self._tokens))
            return self._release(end)._replace(stop=match.stop)
        return self._release(end - len(match.stop))._replace(stop=match.stop)

    def _release(self, upto: int) -> TextDelta:
        count = upto - self._released
        text, self._text = self._text[:count], self._text[count:]
        self._released = upto
        tokens = []
        while self._ends and self._ends[0] <= upto:
            self._ends.popleft()
            tokens.append(self._tokens.popleft())
        return TextDelta(text, tokens, logprobs=self._take_logprobs(len(tokens)))

    def _keep(self, logprobs: Logprobs | None) -> None:
        if self._logprobs is None:
            self._logprobs = logprobs
        elif logprobs is not None:
            self._logprobs.extend(logprobs)

    def _take_logprobs(self, count: int) -> Logprobs | None:
        held = self._logprobs
        if held is None or count == 0:
            return None
        self._logprobs = held.slice(count, len(held)) if len(held) > count else None
        return held.slice(0, count) if len(held) > count else held
