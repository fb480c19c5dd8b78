"""Options of a benchmark."""

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
"""Options that apply only to some datasets, with these datasets."""


class Range(msgspec.Struct, frozen=True):
    """Range of lengths in tokens, drawn uniformly from ``low`` to ``high``, both included."""

    low: int
    high: int

    def __str__(self) -> str:
        return f"{self.low}" if self.low == self.high else f"{self.low} to {self.high}"


class BenchOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Flags of ``penstock bench``. Without ``rate``, the load is a closed loop of ``concurrency`` streams."""

    address: str
    model: str = ""
    """Name of the model; empty for the served model."""
    lora: str = ""
    """Name of a LoRA adapter of the model; empty for none."""
    concurrency: (
        Annotated[
            int,
            Meta(
                ge=1,
                le=65_536,
                description=(
                    "Number of concurrent requests. When a request ends, the next request is sent; unset: 8, "
                    "unless --rate is given."
                ),
            ),
        ]
        | None
    ) = None
    rate: (
        Annotated[
            float,
            Meta(
                ge=0.001,
                le=1_000_000,
                description=("Average number of requests per second. Requests are sent at random (Poisson) times."),
            ),
        ]
        | None
    ) = None
    requests: (
        Annotated[
            int,
            Meta(
                ge=1, le=2**31, description=("Number of requests to send; unset: 100, or as many as --duration allows.")
            ),
        ]
        | None
    ) = None
    duration: (
        Annotated[
            float,
            Meta(
                ge=0.001,
                le=604_800,
                description=(
                    "Number of seconds during which requests are sent. Requests that are still running after that "
                    "finish."
                ),
            ),
        ]
        | None
    ) = None
    warmup: Annotated[
        int,
        Meta(
            ge=0,
            le=2**31,
            description=("Number of requests to send before the measurement. These requests are not counted."),
        ),
    ] = 2
    timeout: (
        Annotated[float, Meta(ge=0.001, description="Timeout of a request in seconds; unset: no limit.")] | None
    ) = None
    channels: Annotated[int, Meta(ge=1, le=256, description="Number of connections to the server.")] = 1
    dataset: Annotated[
        Literal["random", "sharegpt", "prefix-repetition", "json-schema"],
        Meta(
            description=(
                "Source of the prompts. random: random token ids. sharegpt: conversations from a ShareGPT file. "
                "prefix-repetition: prompts that share a few prefixes. json-schema: requests for JSON that follows a "
                "schema."
            )
        ),
    ] = "random"
    dataset_path: Annotated[
        str,
        Meta(
            description=(
                "File of the dataset. For sharegpt: a JSON list of conversations. For json-schema: lines with JSON "
                "objects that have schema and optionally prompt and max_tokens; empty: generated schemas."
            )
        ),
    ] = ""
    prompts: Annotated[
        str,
        Meta(
            description=(
                "File of prompts to repeat instead of a dataset: one text per line, or in a .jsonl file objects with "
                "prompt (text or token ids) and optionally max_tokens."
            )
        ),
    ] = ""
    input_len: Annotated[str, Meta(description="Length of random prompts in tokens, N or LOW:HIGH; empty: 128.")] = ""
    output_len: Annotated[
        str,
        Meta(
            description=(
                "Number of new tokens per request, N or LOW:HIGH; empty: 128; for sharegpt as many as the "
                "conversation's answer has; for json-schema up to 512."
            )
        ),
    ] = ""
    shared_prefix_len: Annotated[
        int,
        Meta(
            ge=0,
            le=2**31,
            description="Number of tokens in a prefix that all random prompts share, in addition to --input-len.",
        ),
    ] = 0
    prefix_repetition_prefix_len: Annotated[
        int, Meta(ge=0, le=2**31, description="Tokens per prefix of the prefix-repetition dataset.")
    ] = 256
    prefix_repetition_suffix_len: Annotated[
        int, Meta(ge=1, le=2**31, description="Tokens after the prefix, per prompt of the prefix-repetition dataset.")
    ] = 256
    prefix_repetition_num_prefixes: Annotated[
        int, Meta(ge=1, le=1_000_000, description="Number of prefixes in the prefix-repetition dataset.")
    ] = 10
    prefix_repetition_output_len: Annotated[
        int, Meta(ge=1, le=2**31, description=("New tokens per request of the prefix-repetition dataset."))
    ] = 128
    num_schemas: Annotated[
        int,
        Meta(
            ge=1,
            le=100_000,
            description=("Number of different schemas that the json-schema dataset generates and uses in turn."),
        ),
    ] = 10
    images: Annotated[
        int, Meta(ge=0, le=1024, description="Number of images before each random prompt, for multimodal models.")
    ] = 0
    image_size: Annotated[str, Meta(description="Image width and height in pixels, as WxH; empty: 512x512.")] = ""
    image_repeat: Annotated[
        int, Meta(ge=1, le=1_000_000, description="Number of consecutive requests with the same images.")
    ] = 1
    end_at_eos: Annotated[
        bool, Meta(description=("Let outputs end at the end-of-sequence token, before their full length."))
    ] = False
    bench_seed: Annotated[int, Meta(description="Seed of random prompts, lengths and times.")] = 0
    json: Annotated[
        str, Meta(description="Write results and every request as JSON to this file; - for standard output.")
    ] = ""
    plot: Annotated[
        str,
        Meta(description="Draw the results into this file (.png, .svg or .pdf). Needs matplotlib: penstock[plot]."),
    ] = ""
    report: Annotated[
        str,
        Meta(
            description=(
                "Write a report with settings, tables and charts to this file (.html). Needs matplotlib: penstock[plot]."
            )
        ),
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
                raise ConfigError(f"--{name.replace('_', '-')} is given, but --images is 0; set --images to use it")

    def _check_dataset(self) -> None:
        """Raise ConfigError if an option does not apply to the dataset, or if a required option is missing."""
        if self.prompts and self.dataset != "random":
            raise ConfigError(f"--prompts and --dataset {self.dataset} both provide prompts; give only one of them")
        for field in msgspec.structs.fields(self):
            datasets = _BELONGS_TO.get(field.name, (self.dataset,))
            given = getattr(self, field.name) != field.default
            flag = f"--{field.name.replace('_', '-')}"
            if given and self.dataset not in datasets:
                raise ConfigError(f"{flag} is for --dataset {' and '.join(datasets)}, not for {self.dataset}")
            if given and self.prompts and field.name in ("input_len", "shared_prefix_len", "images"):
                raise ConfigError(f"{flag} is for random prompts, but --prompts is given; leave one of them out")
        if self.dataset == "sharegpt" and not self.dataset_path:
            raise ConfigError("--dataset sharegpt needs --dataset-path, a JSON file of conversations")

    @property
    def streams(self) -> int:
        """Number of concurrent requests in a closed loop."""
        return self.concurrency or DEFAULT_CONCURRENCY

    @property
    def limit(self) -> int | None:
        """Number of requests to send; None to send as many as the duration allows."""
        return self.requests or (None if self.duration is not None else DEFAULT_REQUESTS)

    @property
    def input_range(self) -> Range:
        """Range of random prompt lengths, without the shared prefix."""
        return parse_range(self.input_len or DEFAULT_INPUT_LEN, flag="--input-len")

    @property
    def image_pixels(self) -> tuple[int, int]:
        """Width and height of images in pixels."""
        width, cross, height = (self.image_size or DEFAULT_IMAGE_SIZE).partition("x")
        if not (cross and width.isdecimal() and height.isdecimal()):
            raise ConfigError(f"--image-size {self.image_size}: expected WxH, e.g. {DEFAULT_IMAGE_SIZE}")
        for side in (int(width), int(height)):
            check_range("--image-size (a side)", side, low=1, high=16_384)
        return int(width), int(height)

    @property
    def output_range(self) -> Range:
        """Range of output lengths."""
        default = DEFAULT_JSON_LEN if self.dataset == "json-schema" else DEFAULT_OUTPUT_LEN
        return parse_range(self.output_len or default, flag="--output-len")

    @property
    def may_end(self) -> bool:
        """Whether outputs may end before their full length. Outputs with a schema may always end early."""
        return self.end_at_eos or self.dataset == "json-schema"

    @property
    def load(self) -> str:
        """Description of the load in words."""
        pace = f"{self.rate:g} requests/s" if self.rate is not None else f"{self.streams} at once"
        count = f"{self.limit} requests" if self.limit is not None else "requests"
        return f"{count}, {pace}" + (f", for {self.duration:g} s" if self.duration is not None else "")


def parse_range(text: str, *, flag: str) -> Range:
    """Parse ``128`` or ``64:256``. Raises ConfigError naming the flag."""
    low, colon, high = text.partition(":")
    if not low.isdecimal() or not (high.isdecimal() if colon else not high):
        raise ConfigError(f"{flag} {text}: expected a number of tokens, or LOW:HIGH")
    span = Range(int(low), int(high) if colon else int(low))
    check_range(f"{flag} (low)", span.low, low=1)
    if span.high < span.low:
        raise ConfigError(f"{flag} {text}: {span.high} is below {span.low}")
    return span
