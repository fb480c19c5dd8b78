"""What ``penstock batch`` is to do."""

from collections.abc import Mapping
from typing import Annotated, ClassVar

import msgspec
from msgspec import Meta

from penstock_common.config.checks import check_flags
from penstock_common.errors import ConfigError


class BatchOptions(msgspec.Struct, frozen=True, kw_only=True):
    """From what is read to what is written, and who computes it. Raises ConfigError."""

    IDLE_WITH: ClassVar[Mapping[str, tuple[str, ...]]] = {"retry_errors": ("overwrite",)}

    input: Annotated[
        str, Meta(min_length=1, description="File of requests, a JSON object on each line; or a URL that fsspec opens.")
    ]
    output: Annotated[str, Meta(min_length=1, description="File of answers; what it holds already is not done again.")]
    errors: Annotated[
        str, Meta(description="File of the lines that failed; unset: the output's name with .errors.")
    ] = ""
    model: Annotated[str, Meta(description="Checkpoint to compute with, in this process.")] = ""
    server: Annotated[tuple[str, ...], Meta(description="URL of a server's HTTP port instead.")] = ()
    served_model_name: Annotated[str, Meta(description="What the requests call the model; unset: by its path.")] = ""
    unordered: Annotated[bool, Meta(description="Write answers as they come instead of in the order of the input.")] = (
        False
    )
    overwrite: Annotated[bool, Meta(description="Begin anew: drop what the output and the error file hold.")] = False
    retry_errors: Annotated[bool, Meta(description="Do lines again that are in the error file.")] = False
    concurrency: (
        Annotated[
            int,
            Meta(
                ge=1,
                le=65_536,
                description="Requests at once; unset: 64 for each server, or as many as the engine keeps busy with.",
            ),
        ]
        | None
    ) = None
    dtype: Annotated[str, Meta(description="Type of the model's numbers.")] = ""
    device: Annotated[str, Meta(description="Device of the model.")] = ""
    max_model_len: Annotated[int, Meta(ge=1, description="Longest sequence in tokens.")] | None = None
    max_num_seqs: Annotated[int, Meta(ge=1, description="Sequences that the engine computes at once.")] | None = None
    kv_cache_memory: Annotated[str, Meta(description="Memory of the KV cache, as 2GiB.")] = ""
    tensor_parallel_size: Annotated[int, Meta(ge=1, description="Workers that the model is split over.")] | None = None
    num_threads: Annotated[int, Meta(ge=1, description="CPU threads of the engine.")] | None = None
    lora: Mapping[str, str] = {}
    """Directories of LoRA adapters by the names that requests have as ``model`` or ``lora``."""
    task: Annotated[str, Meta(description="What the model is for, as embed, where its config does not say.")] = ""

    def __post_init__(self) -> None:
        check_flags(self)
        if bool(self.model) == bool(self.server):
            raise ConfigError(
                "give --model, a checkpoint to compute with here, or --server, the URL of a server"
                + (", not both" if self.model else "")
            )
        if len({self.input, self.output, self.error_file}) < 3:
            raise ConfigError("the input, the output and the error file must differ")
        for name in (*_ENGINE_OPTIONS, "lora"):
            if self.server and getattr(self, name) not in (None, "", {}):
                raise ConfigError(f"--{name.replace('_', '-')} is for an engine in this process; --server has its own")

    @property
    def error_file(self) -> str:
        """Where failures are written."""
        if self.errors:
            return self.errors
        stem, dot, ending = self.output.rpartition(".")
        return f"{stem}.errors.{ending}" if dot and "/" not in ending else f"{self.output}.errors"

    @property
    def engine_options(self) -> dict[str, object]:
        """Those that were given, as of ``LLM``."""
        return {name: value for name in _ENGINE_OPTIONS if (value := getattr(self, name)) not in (None, "")}


_ENGINE_OPTIONS = (
    "served_model_name",
    "dtype",
    "device",
    "max_model_len",
    "max_num_seqs",
    "kv_cache_memory",
    "tensor_parallel_size",
    "num_threads",
    "task",
)
