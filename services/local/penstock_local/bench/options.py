"""What a benchmark does."""

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from penstock_common.config.checks import check_flags, check_range
from penstock_common.errors import ConfigError

DEFAULT_CONCURRENCY, DEFAULT_REQUESTS, DEFAULT_INPUT_LEN = 8, 100, "128"


class Range(msgspec.Struct, frozen=True):
    """Lengths in tokens, drawn evenly from ``low`` to ``high``, both included."""

    low: int
    high: int


class BenchOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The flags of ``penstock bench``. Without ``rate`` it is a closed loop of ``concurrency`` streams."""

    address: str
    model: str = ""
    """Empty: the one that is served."""
    concurrency: (
        Annotated[
            int,
            Meta(
                ge=1,
                le=65_536,
                description="Requests at once, each followed by the next; unset: 8, unless there is a rate.",
            ),
        ]
        | None
    ) = None
    rate: (
        Annotated[
            float,
            Meta(ge=0.001, le=1_000_000, description="Requests per second on average, at random (Poisson) times."),
        ]
        | None
    ) = None
    requests: (
        Annotated[
            int, Meta(ge=1, le=2**31, description="Requests to send; unset: 100, or as many as --duration allows.")
        ]
        | None
    ) = None
    duration: (
        Annotated[
            float,
            Meta(
                ge=0.001,
                le=604_800,
                description="Seconds after which none is sent any more; those that were sent may end.",
            ),
        ]
        | None
    ) = None
    warmup: Annotated[int, Meta(ge=0, le=2**31, description="Requests before, which are not counted.")] = 2
    timeout: (
        Annotated[float, Meta(ge=0.001, description="Seconds that a request may take; unset: any time.")] | None
    ) = None
    channels: Annotated[int, Meta(ge=1, le=256, description="Connections to the server.")] = 1
    prompts: Annotated[
        str,
        Meta(
            description="File of prompts to use over and over: a text per line, or JSON objects with prompt (text or token ids) "
            "and, if wanted, max_tokens; a .json file is a list of conversations as ShareGPT has them."
        ),
    ] = ""
    input_len: Annotated[str, Meta(description="Tokens of random prompts, N or LOW:HIGH; empty: 128.")] = ""
    output_len: Annotated[str, Meta(description="New tokens of a request, N or LOW:HIGH.")] = "128"
    shared_prefix_len: Annotated[
        int,
        Meta(
            ge=0,
            le=2**31,
            description="Tokens that random prompts begin with, the same for all, on top of --input-len.",
        ),
    ] = 0
    end_at_eos: Annotated[bool, Meta(description="Outputs may end before their length.")] = False
    bench_seed: Annotated[int, Meta(description="Seed of random prompts, lengths and times.")] = 0
    json: Annotated[
        str, Meta(description="File that also gets the results, request by request, as JSON; - for standard output.")
    ] = ""
    plot: Annotated[
        str,
        Meta(description="File (.png, .svg, .pdf) that also gets the results drawn; needs matplotlib: penstock[plot]."),
    ] = ""
    sampling: Mapping[str, Any] = {}
    """Fields of SamplingParams."""

    def __post_init__(self) -> None:
        check_flags(self)
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
