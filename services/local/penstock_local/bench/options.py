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
    """The flags of ``penstock bench``. Times in seconds, ``rate`` in requests per second.

    Without ``rate`` it is a closed loop of ``concurrency`` streams. ``sampling`` holds fields of SamplingParams.
    """

    address: str
    model: str = ""
    concurrency: int | None = None
    rate: float | None = None
    requests: int | None = None
    duration: float | None = None
    warmup: int = 2
    timeout: float | None = None
    channels: int = 1
    prompts: str = ""
    input_len: str = ""
    output_len: str = "128"
    shared_prefix_len: int = 0
    end_at_eos: bool = False
    bench_seed: int = 0
    json: str = ""
    plot: str = ""
    sampling: Mapping[str, Any] = {}

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
        self.input_range, self.output_range  # noqa: B018 - raise now

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
