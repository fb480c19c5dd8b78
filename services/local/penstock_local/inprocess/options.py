"""Options of an ``LLM``: the fields of an engine's configuration, without their sections."""

from collections.abc import Mapping
from typing import Any

import msgspec

from penstock_common.config.checks import parse_bytes
from penstock_common.errors import ConfigError, nearest
from penstock_enginecore.config import (
    CacheConfig,
    EngineCoreConfig,
    ExecutorConfig,
    ModelConfig,
    SchedulerConfig,
    StructuredOutputConfig,
)

_SECTIONS: dict[str, type[msgspec.Struct]] = {
    "model": ModelConfig,
    "cache": CacheConfig,
    "scheduler": SchedulerConfig,
    "executor": ExecutorConfig,
    "structured_output": StructuredOutputConfig,
}
_SECTION_OF = {
    field: section for section, kind in _SECTIONS.items() for field in kind.__struct_fields__ if field != "path"
}
_SIZES = ("kv_cache_memory", "compile_memory", "follow_memory", "max_constraint_bytes")


def engine_config(model: str, options: Mapping[str, Any]) -> EngineCoreConfig:
    """The configuration of an engine in this process. Raises ConfigError for an option that is unknown or out of range."""
    sections: dict[str, dict[str, Any]] = {section: {} for section in _SECTIONS}
    sections["model"]["path"] = model
    for name, value in options.items():
        if name not in _SECTION_OF:
            raise ConfigError(f"LLM has no option {name!r}{nearest(name, _SECTION_OF)}")
        sections[_SECTION_OF[name]][name] = parse_bytes(value, key=name) if _is_size(name, value) else value
    try:
        # The plugins of a server are not this program's.
        return msgspec.convert({**sections, "drain_timeout": 0.0, "iteration_log_interval": 0.0}, EngineCoreConfig)
    except msgspec.ValidationError as e:
        raise ConfigError(f"LLM: {e}") from None


def _is_size(name: str, value: object) -> bool:
    return name in _SIZES and isinstance(value, str)
