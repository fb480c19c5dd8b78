"""What the nodes of an engine must be configured alike in."""

import json
from collections.abc import Mapping
from typing import Any

import msgspec

from penstock_enginecore.config import EngineCoreConfig

ENGINE_ONLY = frozenset(
    (
        "engine_id",
        "pool",
        "role",
        "structured_output",
        "data_parallel",
        "expert_parallel",
        "kv_transfer",
        "coordinator",
        "server",
        "peers",
        "metrics",
        "log",
        "tracing",
        "profiler",
        "error_dump",
        "iteration_log_interval",
        "drain_timeout",
        "wedged_after",
    )
)
"""Settings that workers do not compute by. A node may have other values of these; all other settings are compared."""
NODE_ONLY = ("index", "leader", "port", "address", "timeout", "tls")
"""Settings of ``executor.nodes`` that each node has its own values of."""
_ABSENT = "nothing"


def shared_config(config: EngineCoreConfig) -> dict[str, str]:
    """What workers compute by, as JSON by dotted key."""
    values = msgspec.to_builtins(config)
    for name in NODE_ONLY:
        del values["executor"]["nodes"][name]
    found: dict[str, str] = {}
    for section in values:
        if section not in ENGINE_ONLY:
            _flatten(section, values[section], found)
    return found


def difference(ours: Mapping[str, str], theirs: Mapping[str, str]) -> tuple[str, str, str] | None:
    """The first key in which two differ, and what it is in each; None where they are alike."""
    for key in sorted({*ours, *theirs}):
        if ours.get(key) != theirs.get(key):
            return key, ours.get(key, _ABSENT), theirs.get(key, _ABSENT)
    return None


def _flatten(key: str, value: Any, into: dict[str, str]) -> None:
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            _flatten(f"{key}.{name}", inner, into)
    else:
        whole = isinstance(value, float) and value.is_integer()
        into[key] = json.dumps(int(value) if whole else value)
