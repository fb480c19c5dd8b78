"""Options of ``penstock batch``."""

from collections.abc import Mapping
from typing import Annotated, ClassVar

import msgspec
from msgspec import Meta

from penstock_common.config.checks import check_flags
from penstock_common.errors import ConfigError


class BatchOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Flags of ``penstock batch``: input, output and backend. Raises ConfigError if a flag is not valid."""

    IDLE_WITH: ClassVar[Mapping[str, tuple[str, ...]]] = {"retry_errors": ("overwrite",)}

    input: Annotated[
        str,
        Meta(
            min_length=1, description=("File of requests with one JSON object per line, or a URL that fsspec can open.")
        ),
    ]
    output: Annotated[
        str,
        Meta(
            min_length=1,
            description=("File for the answers. Requests that already have an answer in this file are skipped."),
        ),
    ]
    errors: Annotated[
        str, Meta(description="File for failed lines; unset: the name of the output file with .errors.")
    ] = ""
    model: Annotated[str, Meta(description="Run this model in this process: a directory or a hub id.")] = ""
    server: Annotated[tuple[str, ...], Meta(description="Use the running server at this HTTP address instead.")] = ()
    served_model_name: Annotated[
        str, Meta(description=("Name of the model in the requests; unset: derived from its path."))
    ] = ""
    unordered: Annotated[
        bool, Meta(description=("Write answers as soon as they arrive, instead of in the order of the input."))
    ] = False
    overwrite: Annotated[bool, Meta(description="Start over: delete the contents of the output and error files.")] = (
        False
    )
    retry_errors: Annotated[bool, Meta(description="Run the lines in the error file again.")] = False
    concurrency: (
        Annotated[
            int,
            Meta(
                ge=1,
                le=65_536,
                description="Number of concurrent requests; unset: 64 per server, or enough to keep the engine busy.",
            ),
        ]
        | None
    ) = None
    dtype: Annotated[str, Meta(description="Data type of weights and activations; unset: as in the checkpoint.")] = ""
    device: Annotated[
        str, Meta(description="Device to run the model on: cpu or cuda; unset: a GPU if there is one.")
    ] = ""
    max_model_len: (
        Annotated[
            int,
            Meta(
                ge=1,
                description="Maximum length of a sequence in tokens; unset: as long as the model and the KV cache allow.",
            ),
        ]
        | None
    ) = None
    max_num_seqs: Annotated[int, Meta(ge=1, description="Maximum number of sequences per step; unset: 256.")] | None = (
        None
    )
    kv_cache_memory: Annotated[
        str, Meta(description="Size of the KV cache, such as 2GiB; unset: depends on free memory.")
    ] = ""
    tensor_parallel_size: (
        Annotated[int, Meta(ge=1, description="Number of workers that the model is split across; unset: 1.")] | None
    ) = None
    num_threads: (
        Annotated[int, Meta(ge=1, description="Number of CPU threads of the engine; unset: one per usable core.")]
        | None
    ) = None
    no_media: Annotated[
        bool,
        Meta(description="Load only the text model of a multimodal checkpoint, without its vision and audio encoders."),
    ] = False
    lora: Mapping[str, str] = {}
    """Directories of LoRA adapters, by the names that requests use as ``model`` or ``lora``."""
    task: Annotated[str, Meta(description="Task of the model, such as embed, if its config does not define it.")] = ""

    def __post_init__(self) -> None:
        check_flags(self)
        if bool(self.model) == bool(self.server):
            raise ConfigError(
                "give --model to run a model here, or --server with the URL of a server"
                + (", not both" if self.model else "")
            )
        if len({self.input, self.output, self.error_file}) < 3:
            raise ConfigError("the input, the output and the error file must differ")
        for name in (*_ENGINE_OPTIONS, "no_media", "lora"):
            if self.server and getattr(self, name) not in (None, "", {}, False):
                raise ConfigError(
                    f"--{name.replace('_', '-')} applies to an engine in this process; it cannot be used with --server"
                )

    @property
    def error_file(self) -> str:
        """Path of the error file."""
        if self.errors:
            return self.errors
        stem, dot, ending = self.output.rpartition(".")
        return f"{stem}.errors.{ending}" if dot and "/" not in ending else f"{self.output}.errors"

    @property
    def engine_options(self) -> dict[str, object]:
        """Options of the engine that were given, as arguments of ``LLM``."""
        given = {name: value for name in _ENGINE_OPTIONS if (value := getattr(self, name)) not in (None, "")}
        return {**given, "media": False} if self.no_media else given


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
