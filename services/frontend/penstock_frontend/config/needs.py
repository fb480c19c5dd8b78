"""Settings of a frontend that have an effect only together with another one."""

from penstock_common.config.needs import A_PORT, Need, Needs, When, on
from penstock_common.config.shared_needs import OF_ALL

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
