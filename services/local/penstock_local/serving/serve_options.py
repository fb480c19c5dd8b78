"""The flags of ``penstock serve``: what they mean, and which values they may have."""

import json
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

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


def parse_limits(text: str) -> dict[str, int]:
    """Items by modality, of a JSON object such as ``{"image": 4}``, as vLLM has it; empty for none. Raises ConfigError."""
    if not text:
        return {}
    try:
        given: Any = json.loads(text)
    except ValueError as e:
        raise ConfigError(f'{LIMIT_FLAG} {text}: no JSON ({e}); write e.g. {{"image": 4}}') from None
    if not isinstance(given, dict):
        raise ConfigError(f'{LIMIT_FLAG} {text}: no JSON object; write e.g. {{"image": 4}}')
    for modality, count in given.items():
        if modality not in MODALITIES:
            raise ConfigError(f"{LIMIT_FLAG} {text}: {modality!r} is no modality; known: {', '.join(MODALITIES)}")
        if not isinstance(count, int) or isinstance(count, bool) or count < 0:
            raise ConfigError(f"{LIMIT_FLAG} {text}: {modality} is {count!r}; it must be a number of items, 0 for none")
    return given


def given(**settings: Any) -> dict[str, Any]:
    """The settings that are not empty."""
    return {name: value for name, value in settings.items() if value}


Settings = Mapping[str, Mapping[str, Any]]
"""Values by key, by service: coordinator, engine or frontend."""

_EACH_FRONTENDS_OWN = ("server.health_port", "metrics.host", "metrics.port", "http.engine_metrics")
"""Settings that the command sets differently for each of several frontends."""


class ServeOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What to serve and where: the flags of ``penstock serve``."""

    model: Annotated[str, Meta(description="Directory of a Hugging Face checkpoint, or its id on the hub.")]
    served_model_name: Annotated[
        tuple[str, ...],
        Meta(
            description="Name that clients use, unset: the end of MODEL; may be repeated: the others are aliases of the first."
        ),
    ] = ()
    chat_template: Annotated[
        str,
        Meta(description="File with a chat template in jinja2, instead of the model's own; empty: the model's own."),
    ] = ""
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16", "float", "half"],
        Meta(description="Type of weights and activations; auto: the checkpoint's own; float: float32; half: float16."),
    ] = "auto"
    quantization: Annotated[
        Literal["auto", "int8"],
        Meta(description="How weights are kept; auto: as the checkpoint has them; int8: rounded to 8 bits, on CPUs."),
    ] = "auto"
    max_model_len: (
        Annotated[int, Meta(ge=1, description="Tokens of the longest sequence; unset: what fits.")] | None
    ) = None
    engines: Annotated[int, Meta(ge=1, le=64, description="Engine processes, each with the model.")] = 1
    prefill_engines: Annotated[
        int,
        Meta(
            ge=0,
            le=64,
            description="Engine processes for long prompts, whose requests go on on those of --decode-engines; for --engines.",
        ),
    ] = 0
    decode_engines: Annotated[
        int,
        Meta(ge=0, le=64, description="Engine processes for outputs, and for short prompts; with --prefill-engines."),
    ] = 0
    kv_transfer: Annotated[
        Literal["", "auto", "grpc", "shared_memory", "nixl", "off"],
        Meta(
            description="Way on which keys and values of requests go from engine to engine, where others would compute them "
            "again; auto: the best there is; empty: auto with --prefill-engines, else off."
        ),
    ] = ""
    data_parallel_size: Annotated[
        int,
        Meta(
            ge=1,
            le=64,
            description="Engine processes that compute every step together, for models of experts; 1: each computes alone.",
        ),
    ] = 1
    tensor_parallel_size: Annotated[
        int, Meta(ge=1, le=64, description="Workers of each engine, which share every layer of the model among them.")
    ] = 1
    pipeline_parallel_size: Annotated[
        int,
        Meta(
            ge=1,
            le=64,
            description="Stages of each engine, which have some of the layers each, of as many workers as above.",
        ),
    ] = 1
    device: Annotated[
        Literal["auto", "cpu", "cuda"],
        Meta(description="Where engines compute, a GPU for each worker; auto: on GPUs where there are some."),
    ] = "auto"
    kv_cache_memory: (
        Annotated[
            ByteSize,
            Meta(
                ge=1,
                description="Bytes of the KV cache of each engine, or of each worker of one, e.g. 512MiB, 4GiB; unset: by the "
                "memory that is free.",
            ),
        ]
        | None
    ) = None
    host_cache: Annotated[
        ByteSize,
        Meta(
            description="Bytes of host memory of each engine for KV blocks that lose their place in the KV cache, e.g. 8GiB; 0: "
            "none."
        ),
    ] = 0
    disk_cache: Annotated[
        str,
        Meta(
            description="Directory for KV blocks that leave --host-cache, in which each engine has one of its own; it is found "
            "again at the next start. Empty: none."
        ),
    ] = ""
    disk_cache_size: Annotated[
        ByteSize, Meta(description="Bytes that each engine takes in --disk-cache at its start, e.g. 100GiB.")
    ] = 0
    threads_per_engine: (
        Annotated[
            int, Meta(ge=1, le=1024, description="CPU threads of each engine; unset: the cores are shared evenly.")
        ]
        | None
    ) = None
    speculative: Annotated[
        str,
        Meta(
            description="Draft tokens ahead and verify several to a step, which changes none: prediction, ngram, suffix, "
            "draft_model, eagle or eagle3."
        ),
    ] = ""
    speculative_model: Annotated[str, Meta(description="Directory or hub id of the draft model or head.")] = ""
    speculative_tokens: (
        Annotated[
            int, Meta(ge=1, le=MAX_SPECULATIVE_TOKENS, description="Tokens drafted in a step, at most; unset: 5.")
        ]
        | None
    ) = None
    speculative_config: Annotated[
        str,
        Meta(description="All of it as vLLM has it, instead of the three flags before: a JSON object."),
    ] = ""
    lora: Mapping[str, str] = {}
    """Directories of LoRA adapters by name."""
    lora_directory: str = ""
    """Directory whose subdirectories are LoRA adapters; empty: none."""
    limit_mm_per_prompt: Annotated[
        str,
        Meta(
            description='Images, sounds and videos that a request may have, of a model that takes them, as JSON: {"image": 4}; '
            "empty: 16, 4 and 2."
        ),
    ] = ""
    allowed_media_domains: Annotated[
        str,
        Meta(
            description="Hosts that URLs of media may name, with commas between them; *.HOST: those below it; empty: media come "
            "with the request."
        ),
    ] = ""
    media_workers: (
        Annotated[
            int,
            Meta(ge=1, le=256, description="Processes that decode media; unset: half as many as there are cores."),
        ]
        | None
    ) = None
    frontends: Annotated[
        int,
        Meta(ge=1, le=64, description="Frontend processes that share the gRPC and the HTTP port, for more streams."),
    ] = 1
    host: Annotated[str, Meta(description="Interface to listen on; 127.0.0.1: this machine alone.")] = LOOPBACK
    grpc_port: Annotated[int, Meta(ge=1, le=65_535, description="Port of the public gRPC API.")] = 50051
    http_port: Annotated[
        int,
        Meta(
            ge=1,
            le=65_535,
            description="Port of the OpenAI API, health and metrics; several frontends have metrics on the ports behind it.",
        ),
    ] = 8000
    admin_port: Annotated[
        int,
        Meta(ge=1, le=65_535, description="Port of the operators' gRPC API; several frontends have theirs from it on."),
    ] = 50053
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], Meta(description="Least level that the services log.")
    ] = "info"
    settings: Settings = {}
    """Settings that have no flag of their own, by service and key."""

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
        ports = self.all_ports
        if (highest := max(ports, key=lambda each: each[1]))[1] > 65_535:
            raise ConfigError(f"{highest[0]}: with --frontends {self.frontends} the last one would need {highest[1]}")
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
                "--served-model-name is given more than once, and --set frontend.model.aliases; name all aliases in one of them"
            )

    def speculation(self) -> dict[str, Any]:
        """The section ``speculative`` of an engine's configuration; empty: nothing is drafted. Raises ConfigError."""
        section = speculation.of_flags(self.speculative, self.speculative_model, self.speculative_tokens)
        if not self.speculative_config:
            return section
        if section:
            raise ConfigError(
                f"{speculation.FLAG} and {speculation.CONFIG_FLAG} are both given; one of them says it all"
            )
        return speculation.parse_config(self.speculative_config)

    def media_sections(self) -> Mapping[str, Any]:
        """What a frontend's configuration has of media; empty: nothing. Raises ConfigError."""
        hosts = [host.strip() for host in self.allowed_media_domains.split(",") if host.strip()]
        media = given(allowed_domains=hosts, workers=self.media_workers)
        return given(limits=given(max_media=parse_limits(self.limit_mm_per_prompt)), media=media)

    def _check_alone(self, first: str, *others: str) -> None:
        for name in others:
            if (value := getattr(self, name)) > 1:
                raise ConfigError(
                    f"{flag_of(first)} is {getattr(self, first)} and {flag_of(name)} {value}; with the first, the other must be 1"
                )

    def _check_roles(self) -> None:
        prefill, decode = self.prefill_engines, self.decode_engines
        if not prefill or not decode:
            given, missing = ("prefill", "decode") if prefill else ("decode", "prefill")
            raise ConfigError(
                f"--{given}-engines is {prefill or decode} and --{missing}-engines 0; requests that begin on the one kind go on "
                "on the other: both must be at least 1"
            )
        self._check_alone("prefill_engines", "engines", "data_parallel_size")
        if self.kv_transfer == "off":
            raise ConfigError(
                f"--prefill-engines is {prefill} and --kv-transfer off; requests go on elsewhere only with their keys and values"
            )

    @property
    def num_engines(self) -> int:
        """Engine processes, whatever they are for and whether they compute together or not."""
        return self.prefill_engines + self.decode_engines or max(self.engines, self.data_parallel_size)

    def role(self, number: int) -> str:
        """What an engine is preferred for, by its number: those of prompts come first."""
        if not self.prefill_engines:
            return "both"
        return "prefill" if number < self.prefill_engines else "decode"

    @property
    def transport(self) -> str:
        """Way on which keys and values go between engines."""
        return self.kv_transfer or ("auto" if self.prefill_engines else "off")

    @property
    def workers_per_engine(self) -> int:
        """Processes, or threads, that compute, each on a device of its own."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def admin_ports(self) -> list[int]:
        """The port of each frontend's operators' API."""
        return [self.admin_port + i for i in range(self.frontends)]

    @property
    def metrics_ports(self) -> list[int]:
        """The port of each frontend's own ``/metrics``; empty for a single frontend, whose metrics are at the HTTP port."""
        return [self.http_port + 1 + i for i in range(self.frontends)] if self.frontends > 1 else []

    @property
    def all_ports(self) -> list[tuple[str, int]]:
        """Every port that users see, each with the flag that moves it."""
        return [
            ("--grpc-port", self.grpc_port),
            ("--http-port", self.http_port),
            *(("--admin-port", port) for port in self.admin_ports),
            *(("--http-port", port) for port in self.metrics_ports),
        ]

    def _check_sharing(self) -> None:
        if not hasattr(socket, "SO_REUSEPORT"):
            raise ConfigError(f"--frontends is {self.frontends}; this system has no SO_REUSEPORT: it must be 1")
        for key in _EACH_FRONTENDS_OWN:
            if key in self.settings.get("frontend", {}):
                raise ConfigError(f"--set frontend.{key}: with --frontends {self.frontends} each one has its own")

    @property
    def model_name(self) -> str:
        """The name clients use: the given one, or the last part of the model's path or hub id."""
        if self.served_model_name:
            return self.served_model_name[0]
        path = Path(self.model).expanduser()
        return path.resolve().name if path.is_dir() else self.model.rsplit("/", 1)[-1]

    @property
    def aliases(self) -> dict[str, str]:
        """Other names of the model, each with the model's."""
        return dict.fromkeys(self.served_model_name[1:], self.model_name)

    @property
    def client_address(self) -> str:
        """Where a client on this machine reaches the gRPC API."""
        return with_port(self.client_host, self.grpc_port)

    @property
    def client_host(self) -> str:
        """The host that a client on this machine connects to."""
        return LOOPBACK if self.host in ("0.0.0.0", "::", "[::]", "localhost") else self.host
