"""Schemas of the services' config files inside ``values.schema.json``, generated from the services' config structs."""

from typing import Any

import msgspec

from penstock_common.config.sections import ClientTlsConfig, ServerConfig, TlsConfig
from penstock_common.config.settings import PATTERN, Kind, Setting, sections_of, settings_of
from penstock_coordinator.config import CoordinatorConfig, KubernetesConfig
from penstock_enginecore.config import EngineCoreConfig
from penstock_frontend.config import FrontendConfig

STRUCTS: dict[str, type[msgspec.Struct]] = {
    "frontend": FrontendConfig,
    "enginecore": EngineCoreConfig,
    "coordinator": CoordinatorConfig,
}


def _below(section: str, struct: type[msgspec.Struct]) -> set[str]:
    return {f"{section}.{setting.key}" for setting in settings_of(struct)}


SET_BY_CHART = (
    {"server.host", "server.port", "server.health_port", "http.host", "http.port", "http.engine_metrics"}
    | {"metrics.host", "metrics.port", "log.level", "log.format", "log.requests", "log.prompts"}
    | {"tracing.endpoint", "tracing.sample_ratio", "tracing.service_name"}
    | {"model.path", "model.served_model_name", "model.aliases", "model.revision", "model.device"}
    | {
        "coordinator.address",
        "coordinator.advertise",
        "engine_id",
        "pool",
        "drain_timeout",
        "ready_without_engines",
        "auth.api_keys",
        "auth.jwt.jwks",
        "models",
    }
    | {"scaling.pools", "executor.tensor_parallel_size", "executor.pipeline_parallel_size"}
    | {"speculative.method", "speculative.model", "speculative.num_speculative_tokens"}
    | {"media.enabled", "media.workers", "media.worker_memory", "media.allowed_domains", "multimodal.enabled"}
    | {"role", "kv_transfer.transport", "kv_transfer.port", "kv_transfer.advertise"}
    | {"cache.host_memory", "cache.disk", "cache.disk_size"}
    | _below("kv_transfer.tls", ClientTlsConfig)
    | {"lora.max_loras", "lora.max_lora_rank", "lora.cpu_memory", "lora.enabled", "lora.adapters", "lora.directory"}
    | _below("kubernetes", KubernetesConfig) - {"kubernetes.min_replicas", "kubernetes.max_replicas"}
    | _below("server.tls", TlsConfig)
    | _below("http.tls", TlsConfig)
    | _below("coordinator.tls", ClientTlsConfig)
    | _below("engine_tls", ClientTlsConfig)
    | {f"executor.nodes.{name}" for name in ("size", "port", "leader", "index", "address")}
    | _below("executor.nodes.tls", ClientTlsConfig)
    | {"parallel.secret_file"}
    | {f"data_parallel.{name}" for name in ("size", "min_size", "on_rank_loss", "move_after", "address")}
)
"""Settings that the chart sets itself, or offers as a separate value outside ``config``."""

# The coordinator replaces the list of engines. A frontend's id is its pod's name, and its admin port listens only on loopback.
# A pod does not share its ports with other processes, and a frontend serves metrics on its HTTP port.
_ANYWHERE = _below("metrics.tls", TlsConfig) | {"server.reuse_port"}
NOT_OFFERED: dict[str, set[str]] = {
    "frontend": _below("admin", ServerConfig) | {"engines", "frontend_id", "http.reuse_port"} | _ANYWHERE,
    "enginecore": {"cache.num_blocks", "scheduler.scheduler"} | _ANYWHERE,
    "coordinator": _ANYWHERE,
}
"""Settings that have no use in a pod."""

_TYPES = {int: "integer", float: "number", bool: "boolean", str: "string"}
_LIMITS = {"ge": "minimum", "gt": "exclusiveMinimum", "le": "maximum", "lt": "exclusiveMaximum"}


def with_config(schema: dict[str, Any]) -> dict[str, Any]:
    """Return ``schema`` with the ``config`` of every service regenerated."""
    properties = schema["properties"]
    for component, struct in STRUCTS.items():
        own = properties[component]["properties"]
        own["config"] = _config(component, struct, own["config"]["description"])
    return schema


def with_pools(schema: dict[str, Any]) -> dict[str, Any]:
    """Return ``schema`` with the pool definition regenerated: the values of ``enginecore``, all of them optional."""
    engine = schema["properties"]["enginecore"]
    of_all = {**engine, "properties": {k: v for k, v in engine["properties"].items() if k not in ("pools", "config")}}
    pool = _optional(schema, of_all) | {"description": "Values that differ from enginecore."}
    pool["properties"]["config"] = {"$ref": "#/properties/enginecore/properties/config"}
    schema["definitions"]["pool"] = pool
    return schema


def _optional(schema: dict[str, Any], part: dict[str, Any]) -> dict[str, Any]:
    """Return ``part`` without its ``required`` lists. Entries of lists stay unchanged, because Helm replaces a list as
    a whole.
    """
    if "$ref" in part:
        definition = schema["definitions"][part["$ref"].removeprefix("#/definitions/")]
        inlined = _optional(schema, definition)
        return part if inlined == definition else inlined
    kept = {word: value for word, value in part.items() if word != "required"}
    if "properties" in part:
        kept["properties"] = {name: _optional(schema, child) for name, child in part["properties"].items()}
    return kept


def _config(component: str, struct: type[msgspec.Struct], description: str) -> dict[str, Any]:
    root = _object(description)
    hidden = SET_BY_CHART | NOT_OFFERED[component]
    for section in sections_of(struct):
        offered = [setting for setting in section.settings if setting.key not in hidden]
        if not offered:
            continue
        part = root
        for name in filter(None, section.key.split(".")):
            part = part["properties"].setdefault(name, _object(section.description.replace("``", "")))
        for setting in offered:
            part["properties"][setting.key.rpartition(".")[2]] = _value(setting)
    return root


def _object(description: str) -> dict[str, Any]:
    return {"description": description, "type": "object", "additionalProperties": False, "properties": {}}


def _value(setting: Setting) -> dict[str, Any]:
    kind = setting.kind
    part: dict[str, Any] = {"description": kind.description}
    if kind.shape == "list":
        part |= {"type": "array", "items": _entry(kind)}
    elif kind.shape == "mapping":
        part |= {"type": "object", "additionalProperties": _entry(kind)}
    else:
        part |= _entry(kind)
    if kind.optional:
        part["type"] = [*([part["type"]] if isinstance(part["type"], str) else part["type"]), "null"]
    if setting.default is not None:
        part["default"] = setting.default_text if kind.is_size else msgspec.to_builtins(setting.default)
    return part


def _entry(kind: Kind) -> dict[str, Any]:
    part: dict[str, Any] = {"type": ["integer", "string"] if kind.is_size else _TYPES[kind.type]}
    if kind.choices:
        part["enum"] = list(kind.choices)
    if kind.min_length:
        part["minLength"] = kind.min_length
    for name, word in _LIMITS.items():
        if (limit := getattr(kind, name)) is not None:
            part[word] = limit
    if kind.is_size:
        part |= {"minimum": part.get("minimum", 0), "pattern": PATTERN}
    return part
