"""Configuration of a frontend process.

Every value is validated when the struct is built; unknown keys are refused by ``penstock_common.config.loader``. Each field
carries the description and the range of its setting; ``--help``, docs/reference/settings.md and the chart take them from
there. Flags and environment names derive from the field names: ``limits.max_requests`` is ``--limits.max-requests`` and
``PENSTOCK_LIMITS__MAX_REQUESTS``.
"""

import posixpath
import socket
from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

import msgspec
from msgspec import Meta

from penstock_common.addresses import split
from penstock_common.config.checks import ENGINES_DECIDE, check_fields, model_name
from penstock_common.config.sections import (
    ClientTlsConfig,
    LogConfig,
    MetricsConfig,
    PeersConfig,
    ReconnectMax,
    ServerConfig,
    TracingConfig,
)
from penstock_common.config.setting_dependencies import A_PORT, OF_ALL, Need, Needs, When, on
from penstock_common.config.settings import REREAD
from penstock_common.errors import ConfigError
from penstock_common.types.request import MAX_TENANT_WEIGHT, MIN_TENANT_WEIGHT
from penstock_frontend.config.http import HttpConfig
from penstock_frontend.config.limits import AuthConfig, LimitsConfig
from penstock_frontend.config.media import MediaConfig
from penstock_frontend.config.routing import DisaggregationConfig, RoutingConfig

# LoRA adapters, and other names of a model and of its adapters.

MAX_NAME_LENGTH = 256
"""Of an adapter's name, in characters."""
MAX_PATH_LENGTH = 4096


class LoraConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """LoRA adapters that requests may name. Paths are those on the engines' machines."""

    enabled: Annotated[
        bool, Meta(description="Serve LoRA adapters; lora.adapters and lora.directory mean that, too.")
    ] = False
    adapters: Annotated[
        dict[str, str], Meta(description="Directories of adapters by the names that requests use.")
    ] = {}
    directory: Annotated[
        str,
        Meta(
            description="A directory that the frontend and all engines have at this path, and each of whose subdirectories is an "
            "adapter of that name, as they come and go; empty: none."
        ),
    ] = ""
    scan_interval: Annotated[
        float, Meta(ge=0.05, le=3600, description="Seconds between two looks at lora.directory.")
    ] = 2.0
    roots: Annotated[
        tuple[str, ...],
        Meta(
            description="Directories below which adapters lie that may be loaded while requests are served; empty: none may."
        ),
    ] = ()
    max_registered: Annotated[
        int, Meta(ge=1, le=16_384, description="Adapters that can have a name at once, wherever the names come from.")
    ] = 1024
    http_loading: Annotated[
        bool,
        Meta(
            description="Serve /v1/load_lora_adapter and /v1/unload_lora_adapter on the HTTP listener, for callers with the "
            "scope admin, or for everybody where nobody is asked who they are."
        ),
    ] = False

    def __post_init__(self) -> None:
        check_fields("lora", self)
        for name, path in self.adapters.items():
            if refusal := name_refusal(name):
                raise ConfigError(f"lora.adapters: the name {name!r} {refusal}")
            if not path:
                raise ConfigError(f"lora.adapters.{name} is required")
        if len(self.adapters) > self.max_registered:
            raise ConfigError(
                f"lora.adapters has {len(self.adapters)} names; lora.max_registered is {self.max_registered}"
            )
        for root in self.roots:
            if not posixpath.isabs(root):
                raise ConfigError(f"lora.roots: {root!r} must be an absolute path")
        if self.http_loading and not self.serves:
            raise ConfigError("lora.http_loading is true; it needs lora.enabled")

    @property
    def serves(self) -> bool:
        """Whether requests may name adapters."""
        return self.enabled or bool(self.adapters) or bool(self.directory)

    def allows(self, path: str) -> bool:
        """Whether an adapter may be loaded from ``path`` at run time: it lies below a root. Links are not looked at: they are on
        the engines' machines.
        """
        normal = posixpath.normpath(path)
        return posixpath.isabs(path) and any(
            normal.startswith(posixpath.normpath(root).rstrip("/") + "/") for root in self.roots
        )


def name_refusal(name: str) -> str:
    """Why this cannot be an adapter's name; empty where it can."""
    if not name:
        return "is empty"
    if len(name) > MAX_NAME_LENGTH:
        return f"has {len(name)} characters; it must have at most {MAX_NAME_LENGTH}"
    return "" if name.isprintable() and name == name.strip() else "must be printable, without spaces around it"


def check_aliases(aliases: Mapping[str, str], model: str, lora: LoraConfig) -> None:
    """Check the names in ``model.aliases`` against all other names.

    Args:
        aliases: the name that each of them stands for; empty: ``model``.
        model: the model's own name.
        lora: the adapters, some of which may get their names later.

    Raises:
        ConfigError: one cannot be a name, is the name of something else, or stands for nothing that is served.
    """
    for name, target in aliases.items():
        if refusal := name_refusal(name):
            raise ConfigError(f"model.aliases: the name {name!r} {refusal}")
        if name == model:
            raise ConfigError(f"model.aliases: {name!r} is the model's own name")
        if name in lora.adapters:
            raise ConfigError(
                f"model.aliases: {name!r} is the name of a LoRA adapter, in lora.adapters; leave one of them out"
            )
        if target in aliases:
            raise ConfigError(
                f"model.aliases.{name} is {target!r}, which is an alias itself; name what that stands for"
            )
        if target not in ("", model, *lora.adapters) and not (lora.enabled or lora.directory or lora.roots):
            adapters = f" nor one of lora.adapters: {', '.join(sorted(lora.adapters))}" if lora.adapters else ""
            raise ConfigError(
                f"model.aliases.{name} is {target!r}, which is neither the model, {model!r},{adapters or ' nor a LoRA adapter'}"
            )


_HTTP = When(setting="http.port", off=A_PORT)
_METRICS = When(setting="metrics.port", off=A_PORT)
_CREDENTIALS = (on("auth.api_keys"), on("auth.jwt.jwks"))
_ADAPTERS = (on("lora.enabled"), on("lora.adapters"), on("lora.directory"))

NEEDS: Needs = (
    *OF_ALL,
    Need(
        (
            *("coordinator.pools", "coordinator.max_engines", "coordinator.reconnect_max", "coordinator.tls."),
            "ready_without_engines",
        ),
        (on("coordinator.address"),),
    ),
    Need(("peers.",), (on("admin.tls.ca"),)),
    Need(
        (
            *("http.host", "http.reuse_port", "http.page", "http.tls.", "http.responses."),
            *("http.max_body_bytes", "http.max_body_bytes_in_flight", "http.max_body_values", "http.max_body_objects"),
            *("http.max_header_bytes", "http.max_headers", "http.header_timeout", "http.body_timeout"),
            *("http.max_connection_age", "http.max_requests", "http.allowed_origins", "http.allowed_hosts"),
            *("lora.http_loading", "limits.max_prompts", "limits.max_sequences_per_call", "auth.cluster"),
        ),
        (_HTTP,),
    ),
    Need(("http.engine_metrics", "auth.metrics"), (_HTTP, _METRICS)),
    Need(("http.responses.max_stored_bytes",), (on("http.responses.max_stored"),)),
    Need(("auth.cluster",), (on("http.page"),)),
    Need(("auth.admin", "auth.metrics", "auth.cluster"), _CREDENTIALS),
    Need(
        (
            *("auth.jwt.issuer", "auth.jwt.audience", "auth.jwt.algorithms", "auth.jwt.leeway"),
            *("auth.jwt.tenant_claim", "auth.jwt.scope", "auth.jwt.admin_scope"),
        ),
        (on("auth.jwt.jwks"),),
    ),
    Need(("lora.roots", "lora.max_registered", "lora.http_loading"), _ADAPTERS),
    Need(("lora.scan_interval",), (on("lora.directory"),)),
    Need(
        (
            *("media.allowed_domains", "media.max_bytes", "media.max_pixels", "media.max_frames"),
            *("media.max_audio_seconds", "media.workers", "media.worker_memory", "media.worker_timeout"),
            *("media.max_queued", "media.store_bytes", "media.allow_features"),
            *("limits.max_media.", "limits.max_media_bytes_in_flight"),
        ),
        (on("media.enabled"),),
    ),
    Need(
        (
            *("media.allowed_private_networks", "media.ca", "media.fetch_timeout", "media.max_redirects"),
            "media.max_fetches",
        ),
        (on("media.allowed_domains"),),
    ),
    Need(("routing.max_cached_blocks",), (When(setting="routing.policy", values=("prefix_aware",)),)),
    Need(
        ("disaggregation.connector", "disaggregation.allowed_addresses"),
        (on("disaggregation.gateway"),),
    ),
)


SpecialTokensInContent = Literal["parse", "text"]
Weight = Annotated[float, Meta(ge=MIN_TENANT_WEIGHT, le=MAX_TENANT_WEIGHT)]


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Whose tokenizer and generation config are used, and how the model's answers are read."""

    path: Annotated[
        str,
        Meta(
            min_length=1,
            description="Directory of a Hugging Face checkpoint, or its id on the hub, whose tokenizer and generation config are "
            "used.",
        ),
    ]
    served_model_name: Annotated[
        str, Meta(description="Name that clients use; empty: the last part of the path or id.")
    ] = ""
    aliases: Annotated[
        dict[str, str],
        Meta(
            description="Other names that requests may use, each with the name that it stands for: the model's, or that of a "
            "LoRA adapter; empty: the model's."
        ),
    ] = {}
    revision: Annotated[str, Meta(description="Branch, tag or commit on the hub; empty: the default branch.")] = ""
    tool_parser: Annotated[
        str,
        Meta(
            min_length=1,
            description="What finds tool calls in the answers of a chat: deepseek_v3, deepseek_v31, gemma3, glm45, gpt_oss, "
            "granite, hermes, kimi_k2, llama3_json, llama4_pythonic, mistral, phi4, qwen3_coder, none, or one that a plugin "
            "brings; auto goes by the model's chat template.",
        ),
    ] = "auto"
    reasoning_parser: Annotated[
        str,
        Meta(
            min_length=1,
            description="What finds reasoning in the answers of a chat: deepseek_r1, gpt_oss, granite, mistral, qwen3, none, "
            "or one that a plugin brings; auto goes by the model's chat template.",
        ),
    ] = "auto"
    chat_template: Annotated[
        str,
        Meta(
            description="File with a chat template in jinja2, used instead of the model's own ones; empty: the model's own ones."
        ),
    ] = ""
    request_chat_templates: Annotated[
        bool,
        Meta(
            description="Requests may bring a chat template of their own (chat_template of chat completions and of "
            "tokenization), which runs in a sandbox in a process of its own, within 2 seconds; false: such requests are refused."
        ),
    ] = False
    special_tokens_in_content: Annotated[
        SpecialTokensInContent,
        Meta(
            description="How to read the text of a special token, as <|im_end|>, in the messages and tools of a chat. parse: as "
            "the token, so that a message can end its turn and begin another one. text: as the characters that it is made of."
        ),
    ] = "parse"

    def __post_init__(self) -> None:
        check_fields("model", self)

    @property
    def name(self) -> str:
        """The name clients use."""
        return model_name(self.path, self.served_model_name)


class CoordinatorClientConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The connection to the coordinator, which knows the engines."""

    address: Annotated[
        str, Meta(description="The coordinator's host:port; empty: the engines are those of the static list.")
    ] = ""
    pools: Annotated[
        tuple[Annotated[str, Meta(min_length=1, max_length=256)], ...],
        Meta(max_length=64, description="Pools whose engines this frontend uses; empty: those of every pool."),
    ] = ()
    max_engines: Annotated[
        int,
        Meta(
            ge=1,
            le=65_536,
            description="Engines that this frontend connects to; of more it keeps to so many, each frontend to others.",
        ),
    ] = 1024
    reconnect_max: ReconnectMax = 2.0
    tls: ClientTlsConfig = ClientTlsConfig()

    def __post_init__(self) -> None:
        check_fields("coordinator", self)


class FairnessConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How tenants share engines whose queues are not empty."""

    default_weight: Annotated[
        Weight,
        Meta(
            description="Weight of a tenant that has none of its own; one of weight 2 gets twice the tokens of one of weight 1."
        ),
    ] = 1.0
    weights: Annotated[dict[str, Weight], Meta(description="Weights of tenants by name.")] = {}

    def __post_init__(self) -> None:
        check_fields("fairness", self)

    def weight_of(self, tenant: str) -> float:
        """The tenant's weight."""
        return self.weights.get(tenant, self.default_weight)


class RetriesConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a request may survive."""

    max_moves: Annotated[
        int,
        Meta(
            ge=0,
            le=10_000,
            description="Engines that a request may leave, lost or drained, before it ends as UNAVAILABLE.",
        ),
    ] = 20
    max_strikes: Annotated[
        int,
        Meta(
            ge=1,
            le=100,
            description="Engines in a row that may be lost before they brought anything for a request; one that reaches that is "
            "taken for what they died of, and ends.",
        ),
    ] = 3

    def __post_init__(self) -> None:
        check_fields("retries", self)


class DetectionConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How an engine is found out that is not dead enough to break its connection."""

    REMOVED: ClassVar[Mapping[str, str]] = {"wedged_after": ENGINES_DECIDE}

    silence: Annotated[
        float,
        Meta(
            ge=0.05,
            le=3600,
            description="Seconds without a message from an engine that has work of this frontend, after which it is asked how it "
            "is.",
        ),
    ] = 2.0
    probe_timeout: Annotated[
        float,
        Meta(
            ge=0.05,
            le=3600,
            description="Seconds within which an engine has to answer that; it is lost otherwise, or when it answers that it is "
            "wedged (its own wedged_after).",
        ),
    ] = 5.0

    def __post_init__(self) -> None:
        check_fields("detection", self)


class FrontendConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything a frontend process needs to know."""

    NEEDS: ClassVar[Needs] = NEEDS

    model: ModelConfig
    frontend_id: Annotated[str, Meta(description="Name of the frontend in its cluster; empty: the host's.")] = ""
    coordinator: CoordinatorClientConfig = CoordinatorClientConfig()
    engines: Annotated[
        tuple[str, ...], Meta(description="Addresses (host:port) of the engines where there is no coordinator.")
    ] = ()
    server: Annotated[ServerConfig, Meta(description="The gRPC listener of the public API.")] = ServerConfig(
        port=50051, max_connection_age=120.0
    )
    admin: Annotated[
        ServerConfig,
        Meta(description="The gRPC listener of the operators' API, on the loopback interface by default."),
    ] = ServerConfig(host="127.0.0.1", port=50053)
    http: HttpConfig = HttpConfig()
    metrics: Annotated[
        MetricsConfig,
        Meta(
            description="A port for ``/metrics`` alone, beside the HTTP listener's, where other frontends share that one."
        ),
    ] = MetricsConfig()
    engine_tls: Annotated[
        ClientTlsConfig, Meta(description="TLS of the connections to engines; off while ``ca`` is empty.")
    ] = ClientTlsConfig()
    peers: Annotated[
        PeersConfig,
        Meta(
            description="Who may use the operators' API, where it asks for certificates: by the DNS names and URIs of their "
            "subjects (SAN)."
        ),
    ] = PeersConfig()
    auth: AuthConfig = AuthConfig()
    tokenizer_threads: Annotated[int, Meta(ge=1, le=64, description="Threads that tokenize.")] = 2
    limits: Annotated[LimitsConfig, REREAD] = LimitsConfig()
    fairness: Annotated[FairnessConfig, REREAD] = FairnessConfig()
    lora: LoraConfig = LoraConfig()
    media: MediaConfig = MediaConfig()
    routing: RoutingConfig = RoutingConfig()
    disaggregation: DisaggregationConfig = DisaggregationConfig()
    retries: RetriesConfig = RetriesConfig()
    detection: DetectionConfig = DetectionConfig()
    engine_wait_timeout: Annotated[
        float,
        Meta(
            ge=0,
            le=86_400,
            description="Seconds that a request waits for an engine, its first or another one, before it ends as UNAVAILABLE.",
        ),
    ] = 30.0
    max_held_requests: Annotated[int, Meta(ge=0, description="New requests that may wait for an engine at once.")] = (
        10_000
    )
    ready_without_engines: Annotated[
        bool,
        Meta(
            description="Ready as soon as the coordinator has told of the cluster, for engines that scale to zero; false: as "
            "soon as an engine takes requests. From then on it stays ready while engines come and go: it holds requests."
        ),
    ] = False
    drain_timeout: Annotated[
        float,
        Meta(
            ge=0,
            le=86_400,
            description="Seconds after a stop signal in which requests are still taken and served, until all clients have gone "
            "to other frontends; what runs then ends as UNAVAILABLE.",
        ),
    ] = 300.0
    log: Annotated[LogConfig, REREAD] = LogConfig()
    tracing: TracingConfig = TracingConfig()

    def __post_init__(self) -> None:
        check_fields("", self)
        for address in self.engines:
            try:
                split(address)
            except ValueError as e:
                raise ConfigError(f"engines: {address!r} {e}") from None
        if self.metrics.port >= 0 and self.auth.metrics and not self.metrics.tls.ca:
            raise ConfigError(
                f"auth.metrics is true and metrics.port is {self.metrics.port}, which asks for no credentials; "
                "set metrics.tls.ca, or metrics.port to -1"
            )
        if not self.coordinator.address and not self.engines:
            raise ConfigError("coordinator.address or engines is required: the frontend must find its engines")
        if self.model.name in self.lora.adapters:
            raise ConfigError(f"lora.adapters: {self.model.name!r} is the model's own name")
        check_aliases(self.model.aliases, self.model.name, self.lora)
        if self.ready_without_engines and not self.coordinator.address:
            raise ConfigError("ready_without_engines is true; it needs coordinator.address, which tells of new engines")

    @property
    def name(self) -> str:
        """The stable name of this frontend: the given one, or the host's."""
        return self.frontend_id or socket.gethostname()
