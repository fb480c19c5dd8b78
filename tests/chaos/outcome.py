"""Outcome of a request as its client saw it, and its differences from the expected outcome."""

import bisect
import itertools
import time
from collections.abc import Sequence as AnySequence

import msgspec

LOGPROB_TOLERANCE = 1e-3
"""A prompt that is computed again, in other batches, gives the same numbers up to this."""

ON_ITS_WAY = 0.5


class Output(msgspec.Struct):
    """One sequence of a request. ``logprobs`` belong to the tokens; ``usage`` is that of prompt and output."""

    text: str = ""
    token_ids: list[int] = []
    logprobs: list[float] = []
    finish: str = ""
    stop: str = ""
    usage: tuple[int, int] = (0, 0)
    arrivals: list[float] = []
    """When its messages came, monotonic seconds."""

    def wait_across(self, moment: float) -> float:
        """Return the longest wait for a message that overlaps ``moment`` or the half second after it, in seconds.

        Messages in flight at ``moment`` still arrive in that half second. Returns 0 if there are no messages on both
        sides.
        """
        if not self.arrivals or moment < self.arrivals[0]:
            return 0.0
        first = bisect.bisect(self.arrivals, moment)
        last = bisect.bisect(self.arrivals, moment + ON_ITS_WAY)
        return max((b - a for a, b in itertools.pairwise(self.arrivals[first - 1 : last + 1])), default=0.0)


class Outcome(msgspec.Struct):
    """A request from the client's side. ``error``: the status it failed with. Times are in seconds.

    ``first``: to the first message. ``largest_gap``: between two messages of a sequence, or before the first.
        ``refusals``: of
    frontends that did not take it, before one did.
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
        """The sequence, from its first message on."""
        return self.outputs.setdefault(index, Output())

    def arrived(self, output: Output) -> None:
        """A message of the sequence came."""
        now = time.monotonic()
        self.first = self.first or now - self.began
        self.largest_gap = max(self.largest_gap, now - (output.arrivals[-1] if output.arrivals else self.began))
        output.arrivals.append(now)

    @property
    def streamed(self) -> bool:
        """Whether a sequence came in more than one message."""
        return any(len(output.arrivals) > 1 for output in self.outputs.values())

    @property
    def num_tokens(self) -> int:
        """Over all sequences."""
        return sum(len(output.token_ids) for output in self.outputs.values())


class Difference(msgspec.Struct, frozen=True):
    """Difference between an outcome and the expected outcome.

    Attributes:
        failed: The status of a request that should not have failed.
        duplicated: Number of tokens that came twice.
        lost: Number of tokens that never came.
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
    """Tokens delivered twice, tokens never delivered, and where something else begins (None: nowhere)."""
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
