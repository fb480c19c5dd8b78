"""Configuration of a frontend process.

The structs validate every value when they are created. ``penstock_common.config.loader`` refuses unknown keys. From the
description of a field, the ``--help`` text, docs/reference/settings.md and the chart's documentation are generated. The
names of flags and environment variables come from the field names. For example, the field ``limits.max_requests`` has
the flag ``--limits.max-requests`` and the environment variable ``PENSTOCK_LIMITS__MAX_REQUESTS``.
"""

import socket
from collections.abc import Mapping
from typing import Annotated, ClassVar

import msgspec
from msgspec import Meta

from penstock_common.addresses import split
from penstock_common.config.checks import ENGINES_DECIDE, check_fields
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
from penstock_frontend.config.models import (
    MAX_MODELS,
    FurtherModelConfig,
    LoraConfig,
    ModelConfig,
    check_aliases,
    check_distinct,
)
from penstock_frontend.config.routing import DisaggregationConfig, RoutingConfig

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


Weight = Annotated[float, Meta(ge=MIN_TENANT_WEIGHT, le=MAX_TENANT_WEIGHT)]


class CoordinatorClientConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings for the connection to the coordinator, which tells the frontend the list of engines."""

    address: Annotated[
        str,
        Meta(
            description=(
                "Address (host:port) of the coordinator. Empty: no coordinator; the frontend uses the engines listed in "
                "engines."
            )
        ),
    ] = ""
    pools: Annotated[
        tuple[Annotated[str, Meta(min_length=1, max_length=256)], ...],
        Meta(max_length=64, description="Pools whose engines this frontend uses. Empty: all pools."),
    ] = ()
    max_engines: Annotated[
        int,
        Meta(
            ge=1,
            le=65_536,
            description=(
                "Maximum number of engines that this frontend connects to. If the cluster has more engines, each "
                "frontend uses a different subset of them."
            ),
        ),
    ] = 1024
    reconnect_max: ReconnectMax = 2.0
    tls: ClientTlsConfig = ClientTlsConfig()

    def __post_init__(self) -> None:
        check_fields("coordinator", self)


class FairnessConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Weights that decide how tenants share busy engines."""

    default_weight: Annotated[
        Weight,
        Meta(
            description=(
                "Weight of tenants that fairness.weights does not list. A tenant of weight 2 gets twice the tokens "
                "of a tenant of weight 1."
            )
        ),
    ] = 1.0
    weights: Annotated[dict[str, Weight], Meta(description="Weights of tenants, by tenant name.")] = {}

    def __post_init__(self) -> None:
        check_fields("fairness", self)

    def weight_of(self, tenant: str) -> float:
        """Return the weight of a tenant when tenants share busy engines."""
        return self.weights.get(tenant, self.default_weight)


class RetriesConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits on the number of engine losses after which a request is still retried."""

    max_moves: Annotated[
        int,
        Meta(
            ge=0,
            le=10_000,
            description=(
                "Maximum number of moves of a request to another engine, because its engine was lost or drained. If "
                "one more move is needed, the request fails with UNAVAILABLE."
            ),
        ),
    ] = 20
    max_strikes: Annotated[
        int,
        Meta(
            ge=1,
            le=100,
            description=(
                "Number of consecutive engine losses after which a request fails, because it probably crashes engines. "
                "A loss counts if the lost engine had produced no output for the request."
            ),
        ),
    ] = 3

    def __post_init__(self) -> None:
        check_fields("retries", self)


class DetectionConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings for detecting engines that have stopped working while their connection is still open."""

    REMOVED: ClassVar[Mapping[str, str]] = {"wedged_after": ENGINES_DECIDE}

    silence: Annotated[
        float,
        Meta(
            ge=0.05,
            le=3600,
            description=(
                "Seconds without a message after which the frontend sends a health probe to an engine. Applies only "
                "while the engine has requests of this frontend."
            ),
        ),
    ] = 2.0
    probe_timeout: Annotated[
        float,
        Meta(
            ge=0.05,
            le=3600,
            description=(
                "Seconds within which an engine must answer a health probe. The frontend treats the engine as lost if "
                "the engine does not answer, or reports that it is wedged (see the engine's wedged_after)."
            ),
        ),
    ] = 5.0

    def __post_init__(self) -> None:
        check_fields("detection", self)


class FrontendConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All settings of a frontend process."""

    NEEDS: ClassVar[Needs] = NEEDS

    model: ModelConfig
    models: Annotated[
        tuple[FurtherModelConfig, ...],
        Meta(
            description=(
                "Further models behind the same addresses. The model of each request chooses. Each entry has the key "
                "model, with the same keys as the section model. It may have the keys pools (pools of this model's "
                "engines; empty: all pools), engines (addresses, without a coordinator) and lora."
            ),
        ),
    ] = ()
    frontend_id: Annotated[str, Meta(description="Name of the frontend in its cluster. Empty: the host name.")] = ""
    coordinator: CoordinatorClientConfig = CoordinatorClientConfig()
    engines: Annotated[
        tuple[str, ...],
        Meta(description="Addresses (host:port) of the engines, for a frontend without a coordinator."),
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
            description=(
                "An additional listener that serves only ``/metrics``, for frontends that share the HTTP listener's "
                "port."
            )
        ),
    ] = MetricsConfig()
    engine_tls: Annotated[
        ClientTlsConfig, Meta(description="TLS for the connections to engines. TLS is off if ``ca`` is empty.")
    ] = ClientTlsConfig()
    peers: Annotated[
        PeersConfig,
        Meta(
            description=(
                "Clients that may use the operators' API if it requires client certificates, by the DNS names and "
                "URIs in their subject alternative names (SAN)."
            )
        ),
    ] = PeersConfig()
    auth: AuthConfig = AuthConfig()
    tokenizer_threads: Annotated[int, Meta(ge=1, le=64, description="Number of tokenizer threads.")] = 2
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
            description=(
                "Maximum seconds that a request waits for its first engine, or for another engine after it lost its "
                "engine. Then the request fails with UNAVAILABLE."
            ),
        ),
    ] = 30.0
    max_held_requests: Annotated[
        int, Meta(ge=0, description="Maximum number of new requests that wait for an engine at the same time.")
    ] = 10_000
    ready_without_engines: Annotated[
        bool,
        Meta(
            description=(
                "Report ready as soon as the coordinator has sent the state of the cluster. Use this if engines scale "
                "to zero. false: report ready when the first engine accepts requests. Once ready, the frontend stays "
                "ready when engines start and stop. While there is no engine, the frontend holds requests."
            )
        ),
    ] = False
    drain_timeout: Annotated[
        float,
        Meta(
            ge=0,
            le=86_400,
            description=(
                "Seconds after a stop signal during which the frontend still accepts and serves requests, until all "
                "clients have moved to other frontends. Requests still running at the end fail with UNAVAILABLE."
            ),
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
                f"auth.metrics is true, but the listener on metrics.port {self.metrics.port} requires no credentials; "
                "set metrics.tls.ca, or set metrics.port to -1"
            )
        if not self.coordinator.address and not self.engines:
            raise ConfigError("coordinator.address or engines is required: the frontend must find its engines")
        if self.model.name in self.lora.adapters:
            raise ConfigError(f"lora.adapters: {self.model.name!r} is the model's own name")
        check_aliases(self.model.aliases, self.model.name, self.lora)
        if self.models:
            self._check_models()
        if self.ready_without_engines and not self.coordinator.address:
            raise ConfigError(
                "ready_without_engines is true, but coordinator.address is empty; set it, because only a coordinator "
                "reports new engines"
            )

    def _check_models(self) -> None:
        """Check the further models. Raises ConfigError."""
        if len(self.models) >= MAX_MODELS:
            raise ConfigError(f"models has {len(self.models)} entries; the maximum is {MAX_MODELS - 1}")
        for place, each in enumerate(self.models):
            if self.coordinator.address and each.engines:
                raise ConfigError(
                    f"models[{place}].engines is set, but coordinator.address is set too; use models[{place}].pools"
                )
        check_distinct(
            [
                ("", self.model, self.lora),
                *((f"models[{place}].", each.model, each.lora) for place, each in enumerate(self.models)),
            ]
        )
        self.per_model()

    def per_model(self) -> "list[FrontendConfig]":
        """Return one configuration per model. Each has only one model, and that model's engines and LoRA settings.

        Raises ConfigError if the settings of a model are not valid.
        """
        return [msgspec.structs.replace(self, models=()) if self.models else self] + [
            self._only(place, each) for place, each in enumerate(self.models)
        ]

    def _only(self, place: int, further: FurtherModelConfig) -> "FrontendConfig":
        try:
            return msgspec.structs.replace(
                self,
                model=further.model,
                models=(),
                # The coordinator counts the held requests of each name, so each model needs a name.
                frontend_id=f"{self.name}/{further.model.name}",
                coordinator=msgspec.structs.replace(self.coordinator, pools=further.pools),
                engines=further.engines,
                lora=further.lora,
            )
        except ConfigError as e:
            raise ConfigError(f"models[{place}]: {e}") from None

    @property
    def name(self) -> str:
        """Stable name of this frontend. The name is ``frontend_id``, or the host name if ``frontend_id`` is empty."""
        return self.frontend_id or socket.gethostname()
