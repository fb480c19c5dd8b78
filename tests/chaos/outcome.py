"""Outcome of a request on the client's side, and its differences from the expected outcome."""

import bisect
import itertools
import time
from collections.abc import Sequence as AnySequence

import msgspec

LOGPROB_TOLERANCE = 1e-3
"""Maximum difference of log-probabilities when a prompt is recomputed in a different batch."""

ON_ITS_WAY = 0.5


class Output(msgspec.Struct):
    """Output of one sequence of a request.

    Attributes:
        logprobs: Log-probabilities of the output tokens.
        usage: Number of prompt tokens and of output tokens.
    """

    text: str = ""
    token_ids: list[int] = []
    logprobs: list[float] = []
    finish: str = ""
    stop: str = ""
    usage: tuple[int, int] = (0, 0)
    arrivals: list[float] = []
    """Arrival times of the sequence's messages, in monotonic seconds."""

    def wait_across(self, moment: float) -> float:
        """Return the longest wait between two messages that overlaps ``moment`` or the following half second, in
        seconds.

        Messages in flight at ``moment`` still arrive within the half second. Returns 0 if there are no messages before
        or none after ``moment``.
        """
        if not self.arrivals or moment < self.arrivals[0]:
            return 0.0
        first = bisect.bisect(self.arrivals, moment)
        last = bisect.bisect(self.arrivals, moment + ON_ITS_WAY)
        return max((b - a for a, b in itertools.pairwise(self.arrivals[first - 1 : last + 1])), default=0.0)


class Outcome(msgspec.Struct):
    """Outcome of a request on the client's side. Times are in seconds.

    Attributes:
        error: Status of the error; empty if the request succeeded.
        first: Time until the first message.
        largest_gap: Longest time between two messages of a sequence, or before its first message.
        refusals: Codes of the refusals before a frontend accepted the request.
    """

    outputs: dict[int, Output] = {}
    error: str = ""
    message: str = ""
    seconds: float = 0.0
    first: float = 0.0
    largest_gap: float = 0.0
    began: float = msgspec.field(default_factory=time.monotonic)
    refusals: list[str] = []

    def at(self, index: int) -> Output:
        """Return the output of a sequence. Creates the output on the first call."""
        return self.outputs.setdefault(index, Output())

    def arrived(self, output: Output) -> None:
        """Record the arrival of a message of the sequence."""
        now = time.monotonic()
        self.first = self.first or now - self.began
        self.largest_gap = max(self.largest_gap, now - (output.arrivals[-1] if output.arrivals else self.began))
        output.arrivals.append(now)

    @property
    def streamed(self) -> bool:
        """Whether a sequence arrived in more than one message."""
        return any(len(output.arrivals) > 1 for output in self.outputs.values())

    @property
    def num_tokens(self) -> int:
        """Number of output tokens of all sequences."""
        return sum(len(output.token_ids) for output in self.outputs.values())


class Difference(msgspec.Struct, frozen=True):
    """Difference between an outcome and the expected outcome.

    Attributes:
        failed: Status of a request that should have succeeded.
        duplicated: Number of tokens that arrived twice.
        lost: Number of tokens that never arrived.
        differing: Other differences, as text.
    """

    failed: str = ""
    duplicated: int = 0
    lost: int = 0
    differing: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return self != Difference()


def difference(expected: Outcome, got: Outcome) -> Difference:
    """Return the errors in ``got``. If the outcomes are equal, no field of the result is set."""
    if got.error and got.error != expected.error:
        return Difference(failed=got.error)
    if expected.error or expected.outputs.keys() != got.outputs.keys():
        same = expected.error == got.error and expected.outputs.keys() == got.outputs.keys()
        what = f"{got.error or 'no error'} instead of {expected.error or 'none'}, sequences {sorted(got.outputs)}"
        return Difference() if same else Difference(differing=(what,))
    duplicated = lost = 0
    words: list[str] = []
    for index, output in expected.outputs.items():
        twice, never, at = tokens_differ(output.token_ids, got.outputs[index].token_ids)
        duplicated, lost = duplicated + twice, lost + never
        if at is not None:
            words.append(f"[{index}] tokens from {at} on")
        words += [f"[{index}] {name}" for name in _other_fields(output, got.outputs[index])]
    return Difference(duplicated=duplicated, lost=lost, differing=tuple(words))


def tokens_differ(expected: AnySequence[int], got: AnySequence[int]) -> tuple[int, int, int | None]:
    """Return the number of duplicated tokens, the number of lost tokens, and the position of any other difference.

    The position is None if there is no other difference.
    """
    expected, got = list(expected), list(got)
    at = next((i for i, (a, b) in enumerate(zip(expected, got, strict=False)) if a != b), min(len(expected), len(got)))
    if at == len(expected) == len(got):
        return 0, 0, None
    surplus = len(got) - len(expected)
    if surplus > 0 and _is_repeated(got, at, surplus) and got[at + surplus :] == expected[at:]:
        return surplus, 0, None
    if surplus < 0 and expected[at - surplus :] == got[at:]:
        return 0, -surplus, None
    return 0, 0, at


def _is_repeated(tokens: list[int], at: int, count: int) -> bool:
    """Return whether the ``count`` tokens at ``at`` repeat the tokens before them."""
    return at >= count and tokens[at - count : at] == tokens[at : at + count]


def _other_fields(expected: Output, got: Output) -> list[str]:
    wrong = [
        f"{name}: {getattr(got, name)!r:.60} instead of {getattr(expected, name)!r:.60}"
        for name in ("finish", "stop", "usage")
        if getattr(expected, name) != getattr(got, name)
    ]
    if expected.text != got.text:
        wrong.append("text")
    if len(expected.logprobs) != len(got.logprobs):
        wrong.append(f"{len(got.logprobs)} logprobs instead of {len(expected.logprobs)}")
    elif any(abs(a - b) > LOGPROB_TOLERANCE for a, b in zip(expected.logprobs, got.logprobs, strict=True)):
        wrong.append("logprobs")
    return wrong
