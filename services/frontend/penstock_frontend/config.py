"""Configuration of a frontend process.

Every value is validated when the struct is built; unknown keys are refused by ``penstock_common.config.loader``.
Flags and environment names derive from the field names: ``limits.max_requests`` is ``--limits.max-requests`` and
``PENSTOCK_LIMITS__MAX_REQUESTS``.
"""

import socket
from collections.abc import Mapping
from typing import ClassVar

import msgspec

from penstock_common.config.checks import (
    ENGINES_DECIDE,
    ByteSize,
    check_choice,
    check_range,
    check_reuse_port,
    model_name,
    require,
)
from penstock_common.config.sections import (
    ClientTlsConfig,
    LogConfig,
    MetricsConfig,
    PeersConfig,
    ServerConfig,
    TlsConfig,
    TracingConfig,
)
from penstock_common.errors import ConfigError
from penstock_common.types.request import MAX_TENANT_WEIGHT, MIN_TENANT_WEIGHT

# Symmetric ones are missing on purpose: with them, whoever can check a token can make one.
_JWT_ALGORITHMS = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA")


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Whose tokenizer and generation config to use. ``path`` is a directory or a Hugging Face model id.

    ``tool_parser`` and ``reasoning_parser``: what finds tool calls and reasoning in the answers of a chat, by name: ``hermes``,
    ``llama3_json``; ``qwen3``; one that a plugin brings; ``none``; ``auto`` goes by the model's chat template.
    """

    path: str
    served_model_name: str = ""
    revision: str = ""
    tool_parser: str = "auto"
    reasoning_parser: str = "auto"

    def __post_init__(self) -> None:
        require("model.path", self.path)
        require("model.tool_parser", self.tool_parser)
        require("model.reasoning_parser", self.reasoning_parser)

    @property
    def name(self) -> str:
        """The name clients use."""
        return model_name(self.path, self.served_model_name)


class CoordinatorClientConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where the list of engines comes from. An empty ``address`` uses the static list ``engines``.

    ``reconnect_max``: seconds between two attempts to reach it, at most.
    """

    address: str = ""
    reconnect_max: float = 2.0
    tls: ClientTlsConfig = ClientTlsConfig()

    def __post_init__(self) -> None:
        check_range("coordinator.reconnect_max", self.reconnect_max, low=0.05, high=300)


class HttpConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The HTTP listener with the OpenAI API, ``/health`` and ``/metrics``. Port -1 switches it off. ``reuse_port``: see
    ``ServerConfig``.

    ``max_body_bytes`` and ``max_requests``: what one call may send, and calls that are served at once, or whose bodies are being
    read. ``max_body_bytes_in_flight``: of all bodies whose calls are not admitted yet. ``max_body_values`` and
    ``max_body_objects``: JSON values of one body, and the objects among them. ``header_timeout``, ``body_timeout``: seconds that
    the headers of a request may take from their first byte, and its body from then on.
    ``allowed_origins``: web pages that may call from a browser (CORS), as ``https://example.org`` or ``*``; none by default.
    ``page``: serve a page for people at ``/``, and the state of the engines that it shows, addresses included, at ``/cluster``.
    ``engine_metrics``: ``/metrics`` also has what this frontend knows of its engines' load. Off where the engines' own
    ``/metrics`` are collected, so that nothing is counted twice.
    """

    host: str = "0.0.0.0"
    port: int = 8000
    reuse_port: bool = False
    page: bool = True
    max_body_bytes: ByteSize = 32 * 1024 * 1024
    max_body_bytes_in_flight: ByteSize = 256 * 1024 * 1024
    max_body_values: int = 1024 * 1024
    max_body_objects: int = 64 * 1024
    header_timeout: float = 10.0
    body_timeout: float = 60.0
    max_requests: int = 10_000
    allowed_origins: tuple[str, ...] = ()
    engine_metrics: bool = True
    tls: TlsConfig = TlsConfig()

    def __post_init__(self) -> None:
        require("http.host", self.host)
        check_range("http.port", self.port, low=-1, high=65_535)
        check_reuse_port("http.reuse_port", self.reuse_port)
        check_range("http.max_body_bytes", self.max_body_bytes, low=1)
        check_range("http.max_body_bytes_in_flight", self.max_body_bytes_in_flight, low=self.max_body_bytes)
        check_range("http.max_body_values", self.max_body_values, low=1)
        check_range("http.max_body_objects", self.max_body_objects, low=1)
        check_range("http.header_timeout", self.header_timeout, low=0.05, high=3600)
        check_range("http.body_timeout", self.body_timeout, low=0.05, high=3600)
        check_range("http.max_requests", self.max_requests, low=1)


class JwtConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """JSON Web Tokens that callers may show; off while ``jwks`` is empty.

    ``jwks``: file with the issuer's public keys, a JSON Web Key Set, read anew when it changes. ``issuer``, ``audience``: what
    the claims ``iss`` and ``aud`` must say. ``algorithms``: the only ones taken. ``leeway``: seconds that clocks may differ.
    ``tenant_claim``: the claim that names the caller's tenant. ``scope``: what the claim ``scope`` must have for inference,
    empty: nothing; ``admin_scope``: what it must have for the operators' API.
    """

    jwks: str = ""
    issuer: str = ""
    audience: str = ""
    algorithms: tuple[str, ...] = ("RS256", "ES256", "EdDSA")
    leeway: float = 30.0
    tenant_claim: str = "tenant"
    scope: str = ""
    admin_scope: str = "penstock-admin"

    def __post_init__(self) -> None:
        check_range("auth.jwt.leeway", self.leeway, low=0.0, high=600)
        for algorithm in self.algorithms:
            check_choice("auth.jwt.algorithms", algorithm, _JWT_ALGORITHMS)
        if not self.jwks:
            return
        require("auth.jwt.issuer", self.issuer)
        require("auth.jwt.audience", self.audience)
        require("auth.jwt.tenant_claim", self.tenant_claim)
        require("auth.jwt.admin_scope", self.admin_scope)
        if not self.algorithms:
            raise ConfigError("auth.jwt.algorithms is empty; at least one is required")


class AuthConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Who may call. Callers are asked for credentials as soon as ``api_keys`` or ``jwt.jwks`` is set; ``/health`` and gRPC's
    health service are always open.

    ``api_keys``: file with a key per line, read anew when it changes (docs/security.md has its form). ``admin``: the
    operators' API asks as well, ``metrics``: so does ``/metrics``, ``cluster``: so does ``/cluster``, which the page reads.
    """

    api_keys: str = ""
    jwt: JwtConfig = JwtConfig()
    admin: bool = False
    metrics: bool = False
    cluster: bool = True

    def __post_init__(self) -> None:
        for name in ("admin", "metrics"):
            if getattr(self, name) and not self.enabled:
                raise ConfigError(f"auth.{name} is true; it needs auth.api_keys or auth.jwt.jwks")

    @property
    def enabled(self) -> bool:
        """Whether callers are asked for credentials."""
        return bool(self.api_keys or self.jwt.jwks)


class LimitsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one request may ask for, and how many requests there may be at once.

    ``max_prompt_length`` bounds work before the engines' own limit is applied: characters of a text, ids of a list of token
    ids. Request ids, cache salts and constraints on the output are bounded in bytes. ``max_requests`` counts calls;
    each has ``max_n`` sequences at most. ``max_session_requests``: requests of one GenerateSession at once.
    ``max_pooling_inputs``: inputs of one Embed or Classify, documents of one Score. ``max_tenant_bytes`` is of tenants' names.
    ``max_prompts``: prompts of one completion call over HTTP, each a request; ``max_sequences_per_call``: those times ``n``.
    ``max_prompt_length_in_flight``: characters, token ids and bytes of vectors of all prompts at once. ``max_tenant_requests``:
    sequences of one tenant at once, 0 for no limit. ``max_prompt_parts``: of one mixed prompt. ``max_content_parts``,
    ``max_tool_calls``: of one message. ``max_trace_context_bytes``: names and values of ``routing.trace_context``.
    ``max_message_bytes_in_flight``: of the gRPC messages over 64 KiB of all calls at once, from when they have come until their
    calls end; it takes about three times as much memory.
    """

    max_requests: int = 20_000
    max_message_bytes_in_flight: ByteSize = 512 * 1024 * 1024
    max_prompt_length_in_flight: int = 256 * 1024 * 1024
    max_tenant_requests: int = 0
    max_session_requests: int = 1024
    max_prompt_length: int = 4 * 1024 * 1024
    max_pooling_inputs: int = 2048
    max_prompts: int = 1024
    max_sequences_per_call: int = 4096
    max_prompt_parts: int = 1024
    max_messages: int = 4096
    max_content_parts: int = 1024
    max_tools: int = 1024
    max_tool_calls: int = 1024
    max_trace_context_bytes: int = 8192
    max_request_id_bytes: int = 256
    max_cache_salt_bytes: int = 256
    max_tenant_bytes: int = 256
    max_stop_strings: int = 64
    max_stop_string_chars: int = 256
    max_stop_token_ids: int = 1024
    max_n: int = 128
    max_logit_biases: int = 1024
    max_allowed_token_ids: int = 65_536
    max_bad_words: int = 256
    max_bad_word_chars: int = 256
    max_structured_output_bytes: int = 256 * 1024

    def __post_init__(self) -> None:
        for field in msgspec.structs.fields(self):
            low = 0 if field.name == "max_tenant_requests" else 1
            check_range(f"limits.{field.name}", getattr(self, field.name), low=low)


class FairnessConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How tenants share engines whose queues are not empty. ``weights``: shares of tenants by name, ``default_weight`` those of
    all others. One of weight 2 gets twice the tokens of one of weight 1.
    """

    default_weight: float = 1.0
    weights: dict[str, float] = {}

    def __post_init__(self) -> None:
        for name, weight in (("default_weight", self.default_weight), *self._named()):
            check_range(f"fairness.{name}", weight, low=MIN_TENANT_WEIGHT, high=MAX_TENANT_WEIGHT)

    def weight_of(self, tenant: str) -> float:
        """The tenant's weight."""
        return self.weights.get(tenant, self.default_weight)

    def _named(self) -> list[tuple[str, float]]:
        return [(f"weights.{tenant}", weight) for tenant, weight in self.weights.items()]


class RetriesConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a request may survive. ``max_moves``: engines that it may leave, lost or drained, before it ends as UNAVAILABLE.
    ``max_strikes``: engines in a row that may be lost before they brought anything for it; a request that reaches that is
    taken for what they died of, and ends.
    """

    max_moves: int = 20
    max_strikes: int = 3

    def __post_init__(self) -> None:
        check_range("retries.max_moves", self.max_moves, low=0, high=10_000)
        check_range("retries.max_strikes", self.max_strikes, low=1, high=100)


class DetectionConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How an engine is found out that is not dead enough to break its connection. Times are in seconds.

    ``silence``: an engine that has work of this frontend and says nothing for so long is asked how it is. ``probe_timeout``: one
    that does not answer that within so long is lost. So is one that
    answers that it is wedged, by its own ``wedged_after``.
    """

    REMOVED: ClassVar[Mapping[str, str]] = {"wedged_after": ENGINES_DECIDE}

    silence: float = 2.0
    probe_timeout: float = 5.0

    def __post_init__(self) -> None:
        check_range("detection.silence", self.silence, low=0.05, high=3600)
        check_range("detection.probe_timeout", self.probe_timeout, low=0.05, high=3600)


class FrontendConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything a frontend process needs to know.

    ``engines``: addresses (host:port) used when there is no coordinator. ``tokenizer_threads``: size of the pool that
    tokenizes. ``engine_wait_timeout``: seconds a request waits for an engine, its first or another one, before it ends as
    UNAVAILABLE; ``max_held_requests``: new requests that may wait so at once.
    ``drain_timeout``: seconds that running requests may go on after a stop signal. ``engine_tls``: TLS of the connections to
    engines. ``peers``: who may use the operators' API, where it asks for certificates. ``metrics``: a port for
    ``/metrics`` alone, beside the HTTP listener's, where that one is shared with other frontends.
    """

    model: ModelConfig
    frontend_id: str = ""
    coordinator: CoordinatorClientConfig = CoordinatorClientConfig()
    engines: tuple[str, ...] = ()
    server: ServerConfig = ServerConfig(port=50051)
    admin: ServerConfig = ServerConfig(host="127.0.0.1", port=50053)
    http: HttpConfig = HttpConfig()
    metrics: MetricsConfig = MetricsConfig()
    engine_tls: ClientTlsConfig = ClientTlsConfig()
    peers: PeersConfig = PeersConfig()
    auth: AuthConfig = AuthConfig()
    tokenizer_threads: int = 2
    limits: LimitsConfig = LimitsConfig()
    fairness: FairnessConfig = FairnessConfig()
    retries: RetriesConfig = RetriesConfig()
    detection: DetectionConfig = DetectionConfig()
    engine_wait_timeout: float = 30.0
    max_held_requests: int = 10_000
    drain_timeout: float = 30.0
    log: LogConfig = LogConfig()
    tracing: TracingConfig = TracingConfig()

    def __post_init__(self) -> None:
        check_range("tokenizer_threads", self.tokenizer_threads, low=1, high=64)
        check_range("engine_wait_timeout", self.engine_wait_timeout, low=0.0, high=86_400)
        check_range("max_held_requests", self.max_held_requests, low=0)
        check_range("drain_timeout", self.drain_timeout, low=0.0, high=86_400)
        for address in self.engines:
            if not address.rpartition(":")[2].isdecimal():
                raise ConfigError(f"engines: {address!r} is not host:port")
        if self.metrics.port >= 0 and self.auth.metrics and not self.metrics.tls.ca:
            raise ConfigError(
                f"auth.metrics is true and metrics.port is {self.metrics.port}, which asks for no credentials; "
                "set metrics.tls.ca, or metrics.port to -1"
            )
        if not self.coordinator.address and not self.engines:
            raise ConfigError("coordinator.address or engines is required: the frontend must find its engines")

    @property
    def name(self) -> str:
        """The stable name of this frontend: the given one, or the host's."""
        return self.frontend_id or socket.gethostname()
