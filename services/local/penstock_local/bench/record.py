"""What is noted of each request while the load runs."""

from array import array

import msgspec


class Record(msgspec.Struct, kw_only=True):
    """One request. Times are seconds since the load began."""

    start: float
    end: float = 0.0
    code: str = ""
    """Empty while the request runs, then OK or the name of a status code."""
    message: str = ""
    """Of the error it ended with."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Tokens of the prompt that were in the prefix cache."""
    accepted_draft_tokens: int = 0
    """Output tokens that had been drafted."""
    rejected_draft_tokens: int = 0
    """Drafted tokens that became none."""
    schema: str = ""
    """The JSON schema that the answer must follow; empty: none."""
    text: str = ""
    """The answer, which is kept where there is a schema."""
    problem: str = ""
    """Why the answer is not the JSON that was asked for; empty: it is, or was not looked at."""
    times: "array[float]" = msgspec.field(default_factory=lambda: array("d"))
    """When each message with tokens came."""
    sizes: "array[int]" = msgspec.field(default_factory=lambda: array("l"))
    """How many tokens each of these messages had."""

    @property
    def ok(self) -> bool:
        """Whether it ended well."""
        return self.code == "OK"

    @property
    def num_tokens(self) -> int:
        """Tokens that came."""
        return sum(self.sizes)

    @property
    def ttft(self) -> float | None:
        """Seconds to the first token; None when none came."""
        return self.times[0] - self.start if self.times else None

    @property
    def latency(self) -> float:
        """Seconds from the request to its end."""
        return self.end - self.start

    @property
    def tpot(self) -> float | None:
        """Mean seconds per token after those of the first message; None when there are none."""
        later = sum(self.sizes[1:])
        return (self.times[-1] - self.times[0]) / later if later else None

    def gaps(self) -> list[float]:
        """Seconds between tokens: those that come at once share the wait evenly."""
        gaps: list[float] = []
        for before, now, size in zip(self.times, self.times[1:], self.sizes[1:], strict=False):
            gaps.extend([(now - before) / size] * size)
        return gaps
