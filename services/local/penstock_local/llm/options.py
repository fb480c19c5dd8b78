"""Options of an ``LLM``: fields of an engine's configuration, without section names."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from penstock_common.config.loader import build
from penstock_common.errors import ConfigError, nearest
from penstock_enginecore.config import (
    CacheConfig,
    EngineCoreConfig,
    ExecutorConfig,
    ModelConfig,
    SchedulerConfig,
    StructuredOutputConfig,
)
from penstock_frontend.config import LimitsConfig, MediaConfig
from penstock_frontend.config.models import name_refusal
from penstock_local.commands.lora import adapter_folder
from penstock_local.llm import parameters
from penstock_local.serving import speculation

_SECTIONS: dict[str, type[msgspec.Struct]] = {
    "model": ModelConfig,
    "cache": CacheConfig,
    "scheduler": SchedulerConfig,
    "executor": ExecutorConfig,
    "structured_output": StructuredOutputConfig,
}
OPTIONS = {
    "kv_cache_dtype": ("cache", "dtype"),
    "host_cache": ("cache", "host_memory"),
    "disk_cache": ("cache", "disk"),
    "disk_cache_size": ("cache", "disk_size"),
    "max_loras": ("lora", "max_loras"),
    "max_lora_rank": ("lora", "max_lora_rank"),
    "lora_cpu_memory": ("lora", "cpu_memory"),
    "media": ("multimodal", "enabled"),
}
"""Section and field of each option. If two sections have the same field, such as ``dtype``, the first section is used.
"""
_MOST_LORAS = 64
_SPECULATION = "speculative_config"
"""Name of the option whose value is a complete section, as in vLLM."""
for _section, _kind in _SECTIONS.items():
    for _field in _kind.__struct_fields__:
        if _field != "path":
            OPTIONS.setdefault(_field, (_section, _field))
OPTIONS[_SPECULATION] = ("speculative", "")


def engine_config(model: str, options: Mapping[str, Any], *, num_adapters: int = 0) -> EngineCoreConfig:
    """Build the configuration of an engine in this process.

    ``num_adapters`` is the number of LoRA adapters. One step may use all of them, up to ``_MOST_LORAS``. Raises
    ConfigError for an option that is unknown or out of range.
    """
    sections: dict[str, dict[str, Any]] = {section: {} for section in (*_SECTIONS, "lora", "multimodal")}
    if num_adapters:
        sections["lora"]["max_loras"] = min(num_adapters, _MOST_LORAS)
    sections["model"]["path"] = model
    for name, value in options.items():
        if name not in OPTIONS:
            hint = parameters.replacement(name, parameters.OPTIONS) or nearest(name, OPTIONS)
            raise ConfigError(f"LLM has no option {name!r}{hint}")
        if name == _SPECULATION:
            sections["speculative"] = _speculation(value)
            continue
        section, field = OPTIONS[name]
        sections[section][field] = value
    # Do not load plugins in this program, even if the environment configures them for a server.
    config = build(EngineCoreConfig, {**sections, "drain_timeout": 0.0, "iteration_log_interval": 0.0})
    if num_adapters and not config.lora.enabled:
        raise ConfigError(f"max_loras is 0, but lora names {num_adapters} adapters; set max_loras to at least 1")
    return config


def adapter_paths(given: object) -> dict[str, str]:
    """Return absolute directories of LoRA adapters by name, from the argument ``lora``.

    Empty for None. Raises ConfigError if the argument is not a mapping from valid names to directories.
    """
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise ConfigError(
            f"lora is {given!r}; it must be a mapping from names to directories, such as "
            "{'pirate': './adapters/pirate'}"
        )
    for name, path in given.items():
        if not isinstance(name, str) or not isinstance(path, str | Path):
            raise ConfigError(f"lora has {name!r}: {path!r}; each entry must be a name and a directory")
        if refusal := name_refusal(name):
            raise ConfigError(f"lora: the name {name!r} {refusal}")
    return {name: adapter_folder(str(path), of=f"lora: {name!r}") for name, path in given.items()}


def media_config(domains: object, workers: object) -> MediaConfig:
    """Build the media configuration. Raises ConfigError if an argument is not valid."""
    if isinstance(domains, str) or not isinstance(domains, Iterable):
        raise ConfigError(
            f"allowed_media_domains is {domains!r}; it must be a list of hosts, such as ['images.example.org']"
        )
    return build(MediaConfig, {"allowed_domains": list(domains), "workers": workers})


def media_limits(given: object) -> LimitsConfig:
    """Build the media limits from the argument ``limit_mm_per_prompt``. Raises ConfigError if the argument is not a
    mapping from modalities to numbers.
    """
    if given is None:
        return LimitsConfig()
    if not isinstance(given, Mapping):
        raise ConfigError(
            f"limit_mm_per_prompt is {given!r}; it must be a mapping from modalities to numbers, such as {{'image': 4}}"
        )
    return build(LimitsConfig, {"max_media": dict(given)})


def _speculation(given: object) -> dict[str, Any]:
    """Build the section from the argument ``speculative_config``. Empty for None. Raises ConfigError if the argument is
    not valid.
    """
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise ConfigError(
            f"{_SPECULATION} is {given!r}; it must be a mapping, e.g. {{'method': 'ngram', 'num_speculative_tokens': 5}}"
        )
    section = speculation.section_of(given)
    speculation.check_drafting_model(section)
    return section
