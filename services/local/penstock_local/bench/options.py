"""What a benchmark does."""

from collections.abc import Mapping
from typing import Any

import msgspec

from penstock_common.config.checks import check_range
from penstock_common.errors import ConfigError

DEFAULT_CONCURRENCY, DEFAULT_REQUESTS, DEFAULT_INPUT_LEN = 8, 100, "128"


class Range(msgspec.Struct, frozen=True):
    """Lengths in tokens, drawn evenly from ``low`` to ``high``, both included."""

    low: int
    high: int


class BenchOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The flags of ``penstock bench``."""

    address: str
    model: str = ""
    """Empty: the one that is served."""
    concurrency: int | None = None
    """Requests that run at once in a closed loop; None: DEFAULT_CONCURRENCY. Means nothing beside ``rate``."""
    rate: float | None = None
    """Requests per second on average, sent at random times; None: a closed loop."""
    requests: int | None = None
    """How many are sent; None: DEFAULT_REQUESTS, or as many as ``duration`` allows."""
    duration: float | None = None
    """Seconds after which none is sent; None: no limit."""
    warmup: int = 2
    """Requests that are sent before and not counted."""
    timeout: float | None = None
    """Seconds of one request; None: no limit."""
    channels: int = 1
    """Connections to the server."""
    prompts: str = ""
    """File with the prompts; empty: random token ids."""
    input_len: str = ""
    """Tokens of random prompts, ``N`` or ``LOW:HIGH``; empty: DEFAULT_INPUT_LEN."""
    output_len: str = "128"
    """New tokens of a request, ``N`` or ``LOW:HIGH``."""
    shared_prefix_len: int = 0
    """Tokens that all random prompts begin with, in addition to ``input_len``."""
    end_at_eos: bool = False
    """Whether outputs may end before their length."""
    bench_seed: int = 0
    """Of random prompts, lengths and times."""
    json: str = ""
    """File for the results; ``-``: standard output; empty: none."""
    plot: str = ""
    """File for the plot; empty: none."""
    sampling: Mapping[str, Any] = {}
    """Fields of SamplingParams."""

    def __post_init__(self) -> None:
        check_range("--concurrency", self.concurrency, low=1, high=65_536)
        check_range("--rate", self.rate, low=0.001, high=1e6)
        check_range("--requests", self.requests, low=1)
        check_range("--duration", self.duration, low=0.001, high=604_800)
        check_range("--timeout", self.timeout, low=0.001)
        check_range("--channels", self.channels, low=1, high=256)
        if self.prompts and (self.input_len or self.shared_prefix_len):
            raise ConfigError("--input-len and --shared-prefix-len are for random prompts; --prompts brings its own")
        if self.plot and not self.plot.endswith((".png", ".svg", ".pdf")):
            raise ConfigError(f"--plot {self.plot}: the name must end in .png, .svg or .pdf")
        self.input_range, self.output_range  # noqa: B018 - raises ConfigError for a wrong length

    @property
    def streams(self) -> int:
        """How many requests run at once in a closed loop."""
        return self.concurrency or DEFAULT_CONCURRENCY

    @property
    def limit(self) -> int | None:
        """How many requests are sent; None for as many as the duration allows."""
        return self.requests or (None if self.duration is not None else DEFAULT_REQUESTS)

    @property
    def input_range(self) -> Range:
        """Lengths of random prompts, without the shared prefix."""
        return parse_range(self.input_len or DEFAULT_INPUT_LEN, flag="--input-len")

    @property
    def output_range(self) -> Range:
        """Lengths of outputs."""
        return parse_range(self.output_len, flag="--output-len")

    @property
    def load(self) -> str:
        """The load in words."""
        pace = f"{self.rate:g} requests/s" if self.rate is not None else f"{self.streams} at once"
        count = f"{self.limit} requests" if self.limit is not None else "requests"
        return f"{count}, {pace}" + (f", for {self.duration:g} s" if self.duration is not None else "")


def parse_range(text: str, *, flag: str) -> Range:
    """``128`` or ``64:256``. Raises ConfigError naming the flag."""
    low, colon, high = text.partition(":")
    if not low.isdecimal() or not (high.isdecimal() if colon else not high):
        raise ConfigError(f"{flag} {text}: expected a number of tokens, or LOW:HIGH")
    span = Range(int(low), int(high) if colon else int(low))
    check_range(f"{flag} (low)", span.low, low=1)
    if span.high < span.low:
        raise ConfigError(f"{flag} {text}: {span.high} is below {span.low}")
    return span
