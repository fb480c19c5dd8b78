"""Flags of ``penstock serve``: their meaning and allowed values."""

import json
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from penstock_common.addresses import with_port
from penstock_common.config.checks import check_flags, flag_of, require
from penstock_common.config.settings import ByteSize
from penstock_common.errors import ConfigError
from penstock_common.types.media import MODALITIES
from penstock_common.types.sampling import MAX_SPECULATIVE_TOKENS
from penstock_local.serving import speculation
from penstock_local.serving.machine_resources import LOOPBACK

LIMIT_FLAG = "--limit-mm-per-prompt"
MODELS_FLAG = "--models"
MAX_LORAS = 8
"""Default of ``engine.lora.max_loras`` with ``--lora`` or ``--lora-directory``."""


def parse_limits(text: str) -> dict[str, int]:
    """Parse the maximum number of items per modality from a JSON object such as ``{"image": 4}``, as in vLLM.

    Returns an empty dict for an empty text. Raises ConfigError for invalid text.
    """
    if not text:
        return {}
    try:
        given: Any = json.loads(text)
    except ValueError as e:
        raise ConfigError(f'{LIMIT_FLAG} {text}: not valid JSON ({e}); write e.g. {{"image": 4}}') from None
    if not isinstance(given, dict):
        raise ConfigError(f'{LIMIT_FLAG} {text}: not a JSON object; write e.g. {{"image": 4}}')
    for modality, count in given.items():
        if modality not in MODALITIES:
            raise ConfigError(f"{LIMIT_FLAG} {text}: {modality!r} is not a modality; known: {', '.join(MODALITIES)}")
        if not isinstance(count, int) or isinstance(count, bool) or count < 0:
            raise ConfigError(f"{LIMIT_FLAG} {text}: {modality} is {count!r}; it must be a number of items, 0 for none")
    return given


def given(**settings: Any) -> dict[str, Any]:
    """Return the settings that are not empty."""
    return {name: value for name, value in settings.items() if value}


Settings = Mapping[str, Mapping[str, Any]]
"""Setting values by key, for each service: coordinator, engine or frontend."""

_EACH_FRONTENDS_OWN = ("server.health_port", "metrics.host", "metrics.port", "http.engine_metrics")
"""Settings for which the command sets a different value for each frontend."""


class ServeOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Flags of ``penstock serve``: the model and how to serve it."""

    IDLE_WITH: ClassVar[Mapping[str, tuple[str, ...]]] = dict.fromkeys(
        ("limit_mm_per_prompt", "allowed_media_domains", "media_workers"), ("no_media",)
    )
    """Flags that have no effect with other flags."""

    model: Annotated[
        str,
        Meta(
            description=(
                "Model to serve: directory of a Hugging Face checkpoint, or its id on the hub. May be repeated: requests "
                "choose by name."
            )
        ),
    ]
    served_model_name: Annotated[
        tuple[str, ...],
        Meta(
            description=(
                "Name of the model for clients; unset: the last part of MODEL. May be repeated: further names are "
                "aliases of the first."
            )
        ),
    ] = ()
    chat_template: Annotated[
        str,
        Meta(description="File with a Jinja chat template that replaces the model's own; empty: the model's own."),
    ] = ""
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16", "float", "half"],
        Meta(
            description=(
                "Data type of weights and activations; auto: as in the checkpoint; float: float32; half: float16."
            )
        ),
    ] = "auto"
    quantization: Annotated[
        Literal["auto", "int8", "fp8"],
        Meta(
            description=(
                "Quantization of the weights; auto: as in the checkpoint; int8: round to 8 bits, on CPUs only; fp8: round to "
                "8-bit floats, on GPUs only."
            )
        ),
    ] = "auto"
    max_model_len: (
        Annotated[
            int,
            Meta(
                ge=1,
                description=(
                    "Maximum length of a sequence in tokens; unset: as long as the model and the KV cache allow."
                ),
            ),
        ]
        | None
    ) = None
    engines: Annotated[int, Meta(ge=1, le=64, description="Number of engine processes. Each loads the model.")] = 1
    prefill_engines: Annotated[
        int,
        Meta(
            ge=0,
            le=64,
            description=(
                "Number of engines for long prompts. They hand requests over to --decode-engines. Replaces "
                "--engines; 0: off."
            ),
        ),
    ] = 0
    decode_engines: Annotated[
        int,
        Meta(
            ge=0,
            le=64,
            description="Number of engines for decoding and for short prompts. Requires --prefill-engines; 0: off.",
        ),
    ] = 0
    kv_transfer: Annotated[
        Literal["", "auto", "grpc", "shared_memory", "nixl", "off"],
        Meta(
            description=(
                "Transport for KV blocks between engines, so that engines need not recompute the blocks; auto: the "
                "fastest available; empty: auto with --prefill-engines, else off."
            )
        ),
    ] = ""
    data_parallel_size: Annotated[
        int,
        Meta(
            ge=1,
            le=64,
            description=(
                "Number of engine processes that form one data-parallel group, for models with experts; 1: no group."
            ),
        ),
    ] = 1
    tensor_parallel_size: Annotated[
        int, Meta(ge=1, le=64, description="Number of workers per engine that split every layer of the model.")
    ] = 1
    pipeline_parallel_size: Annotated[
        int,
        Meta(
            ge=1,
            le=64,
            description=(
                "Number of pipeline stages per engine. Each stage has some of the layers and --tensor-parallel-size "
                "workers."
            ),
        ),
    ] = 1
    device: Annotated[
        Literal["auto", "cpu", "cuda"],
        Meta(description="Device of the engines, one GPU for each worker; auto: GPUs if there are any, else the CPU."),
    ] = "auto"
    kv_cache_memory: (
        Annotated[
            ByteSize,
            Meta(
                ge=1,
                description=(
                    "Size of the KV cache of each engine, or of each worker if an engine has several, such as 512MiB "
                    "or 4GiB; unset: depends on free memory."
                ),
            ),
        ]
        | None
    ) = None
    host_cache: Annotated[
        ByteSize,
        Meta(description="Host memory for evicted KV blocks, per engine, such as 8GiB; 0: disabled."),
    ] = 0
    disk_cache: Annotated[
        str,
        Meta(
            description=(
                "Directory for KV blocks evicted from --host-cache. Each engine uses a subdirectory, and reuses it "
                "after a restart. Empty: disabled."
            )
        ),
    ] = ""
    disk_cache_size: Annotated[
        ByteSize,
        Meta(description=("Size of the disk cache of each engine, such as 100GiB. The engine allocates it at start.")),
    ] = 0
    threads_per_engine: (
        Annotated[
            int,
            Meta(ge=1, le=1024, description="Number of CPU threads of each engine; unset: all cores, divided evenly."),
        ]
        | None
    ) = None
    speculative: Annotated[
        str,
        Meta(
            description=(
                "Speculative decoding method, which drafts tokens and verifies several per step without changing the "
                "output: prediction, ngram, suffix, draft_model, eagle, eagle3 or mtp; empty: off."
            )
        ),
    ] = ""
    speculative_model: Annotated[str, Meta(description="Draft model or head: its directory or hub id.")] = ""
    speculative_tokens: (
        Annotated[
            int,
            Meta(ge=1, le=MAX_SPECULATIVE_TOKENS, description="Maximum number of tokens drafted per step; unset: 5."),
        ]
        | None
    ) = None
    speculative_config: Annotated[
        str,
        Meta(
            description=(
                "Speculative decoding configuration as a JSON object with vLLM's keys. Replaces the three flags above."
            )
        ),
    ] = ""
    lora: Mapping[str, str] = {}
    """Directories of LoRA adapters by name."""
    lora_directory: str = ""
    """Directory whose subdirectories are LoRA adapters; empty for none."""
    no_media: Annotated[
        bool,
        Meta(
            description="Serve only the text model of a multimodal checkpoint, without its vision and audio encoders."
        ),
    ] = False
    limit_mm_per_prompt: Annotated[
        str,
        Meta(
            description='Maximum number of images, audio items and videos per request, as JSON, e.g. {"image": 4}; '
            "empty: 16 images, 4 audio items and 2 videos."
        ),
    ] = ""
    allowed_media_domains: Annotated[
        str,
        Meta(
            description=(
                "Hosts from which media URLs may be fetched, separated by commas. *.HOST allows subdomains; empty: "
                "media must be part of the request."
            )
        ),
    ] = ""
    media_workers: (
        Annotated[
            int,
            Meta(ge=1, le=256, description="Number of processes that decode media; unset: half the number of cores."),
        ]
        | None
    ) = None
    frontends: Annotated[
        int,
        Meta(
            ge=1,
            le=64,
            description="Number of frontend processes that share the gRPC and the HTTP port, for more streams.",
        ),
    ] = 1
    host: Annotated[str, Meta(description="Address to listen on; 127.0.0.1: this machine only.")] = LOOPBACK
    grpc_port: Annotated[int, Meta(ge=1, le=65_535, description="Port of the public gRPC API.")] = 50051
    http_port: Annotated[
        int,
        Meta(
            ge=1,
            le=65_535,
            description=(
                "Port of the OpenAI API, health and metrics. With several frontends, their metrics use the following "
                "ports."
            ),
        ),
    ] = 8000
    admin_port: Annotated[
        int,
        Meta(
            ge=1,
            le=65_535,
            description="Port of the admin gRPC API. Several frontends use this port and the following ones.",
        ),
    ] = 50053
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"],
        Meta(description="Minimum level of the services' log messages."),
    ] = "info"
    settings: Settings = {}
    """Values of the flag ``--set``: settings that have no separate flag, by service and key."""
    further: "tuple[ServeOptions, ...]" = ()
    """Options of the further models. Only their model and engines are used."""

    def __post_init__(self) -> None:
        require("MODEL", self.model)
        check_flags(self)
        self.speculation()
        self.media_sections()
        self._check_names()
        if self.data_parallel_size > 1:
            self._check_alone("data_parallel_size", "engines", "tensor_parallel_size", "pipeline_parallel_size")
        if self.prefill_engines or self.decode_engines:
            self._check_roles()
        if self.frontends > 1:
            self._check_sharing()
        if self.further:
            self._check_several()
        ports = self.all_ports
        if (highest := max(ports, key=lambda each: each[1]))[1] > 65_535:
            raise ConfigError(
                f"{highest[0]}: with --frontends {self.frontends} the highest port would be {highest[1]}; it must be "
                "at most 65535"
            )
        if len({port for _, port in ports}) < len(ports):
            raise ConfigError(f"the ports must differ: {', '.join(f'{flag} {port}' for flag, port in ports)}")

    def _check_names(self) -> None:
        if self.model_name in self.lora:
            raise ConfigError(f"--lora {self.model_name}=...: {self.model_name!r} is the model's own name")
        for number, name in enumerate(self.served_model_name):
            if not name or name in self.served_model_name[:number]:
                raise ConfigError(f"--served-model-name {name!r} is {'given twice' if name else 'empty'}")
            if name in self.lora:
                raise ConfigError(
                    f"--served-model-name {name} and --lora {name}=... are the same name; change one of them"
                )
        if self.aliases and "model.aliases" in self.settings.get("frontend", {}):
            raise ConfigError(
                "--served-model-name is repeated and --set frontend.model.aliases is set; give all aliases in "
                "one of them"
            )

    def _check_several(self) -> None:
        names = [name for each in self.models for name in (each.model_name, *each.aliases, *each.lora)]
        if twice := next((name for name in names if names.count(name) > 1), ""):
            raise ConfigError(
                f"several models have the name {twice!r}; give each of them its own served_model_name in the file of "
                f"{MODELS_FLAG}"
            )
        if any(each.data_parallel_size > 1 for each in self.models):
            raise ConfigError(
                f"--data-parallel-size is above 1, but there are {len(self.models)} models; a group needs a penstock serve "
                "of its own"
            )

    @property
    def models(self) -> "tuple[ServeOptions, ...]":
        """Options of each model. The first entry is these options."""
        return (self, *self.further)

    @property
    def total_engines(self) -> int:
        """Number of engine processes of all models."""
        return sum(each.num_engines for each in self.models)

    def speculation(self) -> dict[str, Any]:
        """Return the ``speculative`` section of the engine configuration.

        Empty if speculation is off. Raises ConfigError if the flags are not valid, or both kinds of flags are given.
        """
        section = speculation.of_flags(self.speculative, self.speculative_model, self.speculative_tokens)
        if not self.speculative_config:
            return section
        if section:
            raise ConfigError(f"{speculation.FLAG} and {speculation.CONFIG_FLAG} are both given; use only one of them")
        return speculation.parse_config(self.speculative_config)

    def media_sections(self) -> Mapping[str, Any]:
        """Return the media settings of the frontend configuration. Raises ConfigError if ``--limit-mm-per-prompt`` is
        not valid.
        """
        hosts = [host.strip() for host in self.allowed_media_domains.split(",") if host.strip()]
        media = given(allowed_domains=hosts, workers=self.media_workers)
        if not self.takes_media:
            media["enabled"] = False
        return given(limits=given(max_media=parse_limits(self.limit_mm_per_prompt)), media=media)

    @property
    def takes_media(self) -> bool:
        """Whether the engines load media encoders, by the flag and the engine's setting ``multimodal.enabled``."""
        return not self.no_media and self.settings.get("engine", {}).get("multimodal.enabled") is not False

    def _check_alone(self, first: str, *others: str) -> None:
        for name in others:
            if (value := getattr(self, name)) > 1:
                raise ConfigError(
                    f"{flag_of(first)} is {getattr(self, first)} and {flag_of(name)} {value}; one of them must be 1"
                )

    def _check_roles(self) -> None:
        prefill, decode = self.prefill_engines, self.decode_engines
        if not prefill or not decode:
            given, missing = ("prefill", "decode") if prefill else ("decode", "prefill")
            raise ConfigError(
                f"--{given}-engines is {prefill or decode} and --{missing}-engines 0; requests need both kinds of "
                "engines, so both must be at least 1"
            )
        self._check_alone("prefill_engines", "engines", "data_parallel_size")
        if self.kv_transfer == "off":
            raise ConfigError(
                f"--prefill-engines is {prefill} and --kv-transfer off; decode engines need the KV blocks, so use "
                "another value"
            )

    @property
    def num_engines(self) -> int:
        """Number of engine processes of all kinds."""
        return self.prefill_engines + self.decode_engines or max(self.engines, self.data_parallel_size)

    def role(self, number: int) -> str:
        """Return the preferred role of the engine with this number. Prefill engines have the lowest numbers."""
        if not self.prefill_engines:
            return "both"
        return "prefill" if number < self.prefill_engines else "decode"

    @property
    def transport(self) -> str:
        """Transport for KV blocks between engines."""
        return self.kv_transfer or ("auto" if self.prefill_engines else "off")

    @property
    def workers_per_engine(self) -> int:
        """Number of workers per engine (processes or threads), each with its own device."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def admin_ports(self) -> list[int]:
        """Port of the admin API of each frontend."""
        return [self.admin_port + i for i in range(self.frontends)]

    @property
    def metrics_ports(self) -> list[int]:
        """Port of ``/metrics`` of each frontend. Empty for a single frontend, which uses the HTTP port."""
        return [self.http_port + 1 + i for i in range(self.frontends)] if self.frontends > 1 else []

    @property
    def all_ports(self) -> list[tuple[str, int]]:
        """Public ports, each with the flag that changes the port."""
        return [
            ("--grpc-port", self.grpc_port),
            ("--http-port", self.http_port),
            *(("--admin-port", port) for port in self.admin_ports),
            *(("--http-port", port) for port in self.metrics_ports),
        ]

    def _check_sharing(self) -> None:
        if not hasattr(socket, "SO_REUSEPORT"):
            raise ConfigError(f"--frontends is {self.frontends}; it must be 1, because this system has no SO_REUSEPORT")
        for key in _EACH_FRONTENDS_OWN:
            if key in self.settings.get("frontend", {}):
                raise ConfigError(
                    f"--set frontend.{key} is not allowed with --frontends {self.frontends}, because each frontend needs a "
                    "different value and the command sets these values; remove this --set"
                )

    @property
    def model_name(self) -> str:
        """Name of the model for clients: the given name, or the last part of the model's path or hub id."""
        if self.served_model_name:
            return self.served_model_name[0]
        path = Path(self.model).expanduser()
        return path.resolve().name if path.is_dir() else self.model.rsplit("/", 1)[-1]

    @property
    def aliases(self) -> dict[str, str]:
        """Aliases of the model, each mapped to the model's name."""
        return dict.fromkeys(self.served_model_name[1:], self.model_name)

    @property
    def client_address(self) -> str:
        """Address of the gRPC API for a client on this machine."""
        return with_port(self.client_host, self.grpc_port)

    @property
    def client_host(self) -> str:
        """Host of the gRPC API for a client on this machine."""
        return LOOPBACK if self.host in ("0.0.0.0", "::", "[::]", "localhost") else self.host
