"""Generator of ``values_needs.json``: chart values that have an effect only together with another value.

The file lists these values with their defaults, and the dependencies of the services' settings.
``templates/_needs.tpl`` reads the file and refuses values without effect.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from charts import values_table
from charts.config_schema import STRUCTS
from penstock_common.config.setting_dependencies import ABOVE_ONE, Need, Needs, When, needs_of, on
from penstock_common.config.settings import settings_of

FILE = Path(__file__).resolve().parent / "penstock" / "values_needs.json"

ROOT = "/"
"""Prefix of a chart-wide value in the condition of a pool's value."""
_OFF = ("null", '""', '"0"', "0", "false", "[]", "{}")


def _is(setting: str, *values: str) -> tuple[When, ...]:
    return (When(setting=setting, values=values),)


def _on(setting: str) -> tuple[When, ...]:
    return (on(setting),)


def _above_one(setting: str) -> tuple[When, ...]:
    return (When(setting=setting, off=ABOVE_ONE),)


_SWITCHED = (
    *("metrics.podMonitor", "metrics.prometheusRule", "metrics.dashboard", "networkPolicy", "frontend.autoscaling"),
    *("frontend.grpcRoute", "frontend.httpRoute", "frontend.backendTLSPolicy", "frontend.ingress"),
    *("frontend.grpcIngress", "frontend.inferencePool", "frontend.podDisruptionBudget", "frontend.topologySpread"),
    *("frontend.media", "test"),
)
_ISSUED = ("tls.certManager", "frontend.edge.certManager")

OF_ALL: Needs = (
    *(Need((f"{part}.",), _on(f"{part}.enabled")) for part in _SWITCHED),
    *(Need((f"{part}.",), _on(f"{part}.issuerRef.name")) for part in _ISSUED),
    *(Need((f"model.{source}.",), _is("model.source", source)) for source in ("hub", "pvc", "oci", "init", "image")),
    Need(("model.hostPath.",), _is("model.source", "hostPath")),
    Need(("model.hub.tokenSecret.key",), _on("model.hub.tokenSecret.name")),
    Need(("proxy.",), _is("model.source", "hub", "init")),
    Need(("proxy.noProxy",), (on("proxy.http"), on("proxy.https"))),
    Need(("serviceAccount.annotations",), _on("serviceAccount.create")),
    Need(("tracing.sampleRatio", "networkPolicy.tracing"), _on("tracing.endpoint")),
    Need(("log.prompts",), _on("log.requests")),
    Need(("networkPolicy.metrics",), _on("metrics.enabled")),
    Need(("networkPolicy.hub.",), _is("model.source", "hub", "init")),
    Need(("networkPolicy.media.",), _on("frontend.media.allowedDomains")),
    Need(
        ("frontend.media.workers", "frontend.media.workerMemory", "frontend.media.allowedDomains"),
        _on("enginecore.multimodal.enabled"),
    ),
    Need(("coordinator.kubernetes.admissionPolicy",), _on("coordinator.kubernetes.deletionCosts")),
    Need(("test.keySecret.key",), _on("test.keySecret.name")),
)
"""Dependencies of chart-wide values, by path."""

OF_POOLS: Needs = (
    Need(("gpu.resourceName", "gpu.dra.", "gpu.runtimeClassName"), _on("gpu.count")),
    Need(("gpu.dra.selectors",), _on("gpu.dra.deviceClassName")),
    Need(("speculative.tokens",), _on("speculative.method")),
    Need(("lora.",), _on("lora.enabled")),
    Need(("multiNode.topologyKey",), _above_one("multiNode.size")),
    Need(("dataParallel.",), _above_one("dataParallel.size")),
    Need(("podDisruptionBudget.",), _on("podDisruptionBudget.enabled")),
    Need(("topologySpread.",), _on("topologySpread.enabled")),
    Need(("autoscaling.",), _is("autoscaling.mode", "hpa", "keda")),
    Need(("autoscaling.idleSeconds", "autoscaling.keda."), _is("autoscaling.mode", "keda")),
    Need(("autoscaling.hpa.",), _is("autoscaling.mode", "hpa")),
    Need(("autoscaling.hpa.selector",), _is("autoscaling.hpa.metrics", "External")),
    Need(("modelCache.size",), _is(f"{ROOT}model.source", "hub", "init")),
)
"""Dependencies of values of ``enginecore`` and its pools, by path below ``enginecore`` or the pool."""


def text() -> str:
    """Return the content of the file: rows for ``all`` values, for ``pools``, and for ``config`` by service."""
    values = values_table.default_values()
    pool = values["enginecore"]
    rows: dict[str, Any] = {
        "all": list(_rows(OF_ALL, values, values)),
        "pools": list(_rows(OF_POOLS, pool, values)),
        "config": {service: list(_config_rows(struct)) for service, struct in STRUCTS.items()},
    }
    return json.dumps(rows, indent=1) + "\n"


def _rows(table: Needs, values: dict[str, Any], root: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for path, default in _leaves(values):
        for need in table:
            if need.names(path):
                defaults = {when.setting: _at(values, root, when.setting) for when in need.any_of}
                yield _row(path, default, need, defaults)


def _config_rows(struct: type[msgspec.Struct]) -> Iterator[dict[str, Any]]:
    settings = {setting.key: setting for setting in settings_of(struct)}
    for key, needs in needs_of(struct).items():
        for need in needs:
            defaults = {when.setting: settings[when.setting].default for when in need.any_of}
            row = _row(key, settings[key].default, need, defaults)
            yield row | ({"size": True} if settings[key].kind.is_size else {})


def _row(path: str, default: Any, need: Need, defaults: dict[str, Any]) -> dict[str, Any]:
    conditions = [
        {
            "setting": when.setting,
            "default": defaults[when.setting],
            "values": [json.dumps(value) for value in when.values],
            "off": ["null", *map(json.dumps, when.off)] if when.off in (ABOVE_ONE, (-1,)) else list(_OFF),
        }
        for when in need.any_of
    ]
    words = need.words.replace(ROOT, "")
    return {"setting": path, "default": default, "needs": words, "any_of": conditions}


def _leaves(values: dict[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the path and content of each value that has no nested values in the schema."""
    whole = {".".join(leaf) for leaf in values_table.leaves(_SCHEMA, _SCHEMA)}
    whole |= {name.removeprefix("enginecore.") for name in whole if name.startswith("enginecore.")}
    for key, value in values.items():
        here = f"{path}.{key}" if path else key
        if isinstance(value, dict) and here not in whole:
            yield from _leaves(value, here)
        else:
            yield here, value


def _at(values: dict[str, Any], root: dict[str, Any], path: str) -> Any:
    here: Any = root if path.startswith(ROOT) else values
    for key in path.removeprefix(ROOT).split("."):
        here = here[key]
    return here


_SCHEMA: dict[str, Any] = json.loads(values_table.SCHEMA.read_text(encoding="utf-8"))
