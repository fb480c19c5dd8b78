"""What a benchmark does."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from penstock_common.config.checks import check_flags, check_range
from penstock_common.errors import ConfigError

DEFAULT_CONCURRENCY, DEFAULT_REQUESTS = 8, 100
DEFAULT_IMAGE_SIZE = "512x512"
DEFAULT_INPUT_LEN, DEFAULT_OUTPUT_LEN, DEFAULT_JSON_LEN = "128", "128", "512"
_BELONGS_TO = {
    "dataset_path": ("sharegpt", "json-schema"),
    "input_len": ("random",),
    "shared_prefix_len": ("random",),
    "images": ("random",),
    "image_size": ("random",),
    "image_repeat": ("random",),
    "output_len": ("random", "sharegpt", "json-schema"),
    "prefix_repetition_prefix_len": ("prefix-repetition",),
    "prefix_repetition_suffix_len": ("prefix-repetition",),
    "prefix_repetition_num_prefixes": ("prefix-repetition",),
    "prefix_repetition_output_len": ("prefix-repetition",),
    "num_schemas": ("json-schema",),
    "end_at_eos": ("random", "sharegpt", "prefix-repetition"),
}
"""Options that only some datasets look at."""


class Range(msgspec.Struct, frozen=True):
    """Lengths in tokens, drawn evenly from ``low`` to ``high``, both included."""

    low: int
    high: int

    def __str__(self) -> str:
        return f"{self.low}" if self.low == self.high else f"{self.low} to {self.high}"


class BenchOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The flags of ``penstock bench``. Without ``rate`` it is a closed loop of ``concurrency`` streams."""

    address: str
    model: str = ""
    """Empty: the one that is served."""
    lora: str = ""
    """An adapter of it; empty: none."""
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
    dataset: Annotated[
        Literal["random", "sharegpt", "prefix-repetition", "json-schema"],
        Meta(
            description="What prompts are: random token ids; conversations of a ShareGPT file; few prefixes that many prompts "
            "share; or requests for JSON that follows a schema."
        ),
    ] = "random"
    dataset_path: Annotated[
        str,
        Meta(
            description="File of the dataset: of sharegpt a JSON list of conversations; of json-schema, which makes schemas "
            "without one, lines of JSON objects with schema and, if wanted, prompt and max_tokens."
        ),
    ] = ""
    prompts: Annotated[
        str,
        Meta(
            description="File of prompts to use over and over instead of a dataset: a text per line, or in a .jsonl file JSON "
            "objects with prompt (text or token ids) and, if wanted, max_tokens."
        ),
    ] = ""
    input_len: Annotated[str, Meta(description="Tokens of random prompts, N or LOW:HIGH; empty: 128.")] = ""
    output_len: Annotated[
        str,
        Meta(
            description="New tokens of a request, N or LOW:HIGH; empty: 128, of sharegpt as many as the conversation's own "
            "answer has, of json-schema up to 512."
        ),
    ] = ""
    shared_prefix_len: Annotated[
        int,
        Meta(
            ge=0,
            le=2**31,
            description="Tokens that random prompts begin with, the same for all, on top of --input-len.",
        ),
    ] = 0
    prefix_repetition_prefix_len: Annotated[
        int, Meta(ge=0, le=2**31, description="Tokens of a prefix of prefix-repetition.")
    ] = 256
    prefix_repetition_suffix_len: Annotated[
        int, Meta(ge=1, le=2**31, description="Tokens of its prompts behind their prefix.")
    ] = 256
    prefix_repetition_num_prefixes: Annotated[
        int, Meta(ge=1, le=1_000_000, description="How many prefixes it has.")
    ] = 10
    prefix_repetition_output_len: Annotated[int, Meta(ge=1, le=2**31, description="New tokens of its requests.")] = 128
    num_schemas: Annotated[
        int, Meta(ge=1, le=100_000, description="Different schemas that json-schema makes and uses in turn.")
    ] = 10
    images: Annotated[
        int, Meta(ge=0, le=1024, description="Images that stand before each random prompt, for models that take them.")
    ] = 0
    image_size: Annotated[str, Meta(description="Width and height of them in pixels, as WxH; empty: 512x512.")] = ""
    image_repeat: Annotated[
        int, Meta(ge=1, le=1_000_000, description="Requests one after the other that have the same images.")
    ] = 1
    end_at_eos: Annotated[bool, Meta(description="Outputs may end before their length.")] = False
    bench_seed: Annotated[int, Meta(description="Seed of random prompts, lengths and times.")] = 0
    json: Annotated[
        str, Meta(description="File that also gets the results, request by request, as JSON; - for standard output.")
    ] = ""
    plot: Annotated[
        str,
        Meta(description="File (.png, .svg, .pdf) that also gets the results drawn; needs matplotlib: penstock[plot]."),
    ] = ""
    report: Annotated[
        str, Meta(description="File (.html) that also gets the results as a page: settings, tables and charts.")
    ] = ""
    sampling: Mapping[str, Any] = {}
    """Fields of SamplingParams."""

    def __post_init__(self) -> None:
        check_flags(self)
        self._check_dataset()
        if self.plot and not self.plot.endswith((".png", ".svg", ".pdf")):
            raise ConfigError(f"--plot {self.plot}: the name must end in .png, .svg or .pdf")
        if self.report and not self.report.endswith(".html"):
            raise ConfigError(f"--report {self.report}: the name must end in .html")
        self.input_range, self.output_range, self.image_pixels  # noqa: B018 - raises ConfigError for what is wrong
        for name in ("image_size", "image_repeat"):
            if not self.images and getattr(self, name) not in ("", 1):
                raise ConfigError(f"--{name.replace('_', '-')} is given, and --images is 0: there are none")

    def _check_dataset(self) -> None:
        """Raise ConfigError for an option that says nothing to the dataset, or one that it misses."""
        if self.prompts and self.dataset != "random":
            raise ConfigError(
                f"--prompts brings prompts of its own; --dataset {self.dataset} does, too: give one of them"
            )
        for field in msgspec.structs.fields(self):
            datasets = _BELONGS_TO.get(field.name, (self.dataset,))
            given = getattr(self, field.name) != field.default
            flag = f"--{field.name.replace('_', '-')}"
            if given and self.dataset not in datasets:
                raise ConfigError(f"{flag} is for --dataset {' and '.join(datasets)}, not for {self.dataset}")
            if given and self.prompts and field.name in ("input_len", "shared_prefix_len", "images"):
                raise ConfigError(f"{flag} is for random prompts; --prompts brings its own")
        if self.dataset == "sharegpt" and not self.dataset_path:
            raise ConfigError("--dataset sharegpt needs --dataset-path, a JSON file of conversations")

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
    def image_pixels(self) -> tuple[int, int]:
        """Width and height of images."""
        width, cross, height = (self.image_size or DEFAULT_IMAGE_SIZE).partition("x")
        if not (cross and width.isdecimal() and height.isdecimal()):
            raise ConfigError(f"--image-size {self.image_size}: expected WxH, e.g. {DEFAULT_IMAGE_SIZE}")
        for side in (int(width), int(height)):
            check_range("--image-size (a side)", side, low=1, high=16_384)
        return int(width), int(height)

    @property
    def output_range(self) -> Range:
        """Lengths of outputs."""
        default = DEFAULT_JSON_LEN if self.dataset == "json-schema" else DEFAULT_OUTPUT_LEN
        return parse_range(self.output_len or default, flag="--output-len")

    @property
    def may_end(self) -> bool:
        """Whether outputs may end before their length, as those that follow a schema must."""
        return self.end_at_eos or self.dataset == "json-schema"

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
