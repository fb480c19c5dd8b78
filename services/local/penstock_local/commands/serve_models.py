"""Options of ``penstock serve`` for one or several models, from its flags and from the file of ``--models``."""

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import yaml

from penstock_common.config.checks import flag_of
from penstock_common.config.settings import parse_bytes, settings_of
from penstock_common.errors import ConfigError, nearest
from penstock_local import flags
from penstock_local.commands.lora import parse_adapters, parse_directory
from penstock_local.serving.serve_options import MODELS_FLAG, ServeOptions
from penstock_local.settings import parse_settings

_OF_ONE_MODEL = (
    *("served_model_name", "chat_template", "lora", "lora_directory"),
    *("speculative", "speculative_model", "speculative_tokens", "speculative_config"),
)
"""Flags that belong to one model. With several models, the file has these values."""
_OF_ALL_MODELS = (
    *("dtype", "quantization", "max_model_len", "device", "no_media"),
    *("engines", "prefill_engines", "decode_engines", "kv_transfer", "tensor_parallel_size", "pipeline_parallel_size"),
    *("kv_cache_memory", "threads_per_engine", "host_cache", "disk_cache", "disk_cache_size"),
)
"""Flags that apply to each model. The file may set other values for a model."""
_KEYS = ("model", *_OF_ONE_MODEL, *_OF_ALL_MODELS, "set")
_SECTIONS = ("model.", "lora.")
"""Beginnings of the frontend settings that each model has."""


def options_of_models(arguments: argparse.Namespace) -> ServeOptions:
    """Return the options of ``penstock serve`` from its parsed arguments.

    Raises ConfigError if an option or the file is not valid, or if no model is given.
    """
    if arguments.models_file and arguments.model:
        raise ConfigError(f"MODEL {arguments.model[0]} and {MODELS_FLAG} are both given; use only one of them")
    if arguments.models_file:
        entries = [
            _entry(entry, f"{MODELS_FLAG} {arguments.models_file}: models[{place}]")
            for place, entry in enumerate(_read(arguments.models_file))
        ]
    else:
        entries = [{"model": model} for model in arguments.model]
    if not entries:
        raise ConfigError(f"MODEL is required: give a checkpoint's directory or hub id, or {MODELS_FLAG} FILE")
    first, *further = entries
    if arguments.models_file or further:
        _check_flags(arguments)
    else:
        first |= {
            "lora": parse_adapters(arguments.lora or ()),
            "lora_directory": parse_directory(arguments.lora_directory or ""),
        }
    of_services = parse_settings(arguments.settings or ())
    of_engines = {"engine": of_services["engine"]} if "engine" in of_services else {}
    common = {name: getattr(arguments, name) for name in _OF_ALL_MODELS if getattr(arguments, name) is not None}
    sizes = {setting.key: setting.flag for setting in settings_of(ServeOptions) if setting.kind.is_size}
    common = {name: parse_bytes(value, key=sizes[name]) if name in sizes else value for name, value in common.items()}
    return flags.options_of(
        ServeOptions,
        arguments,
        **first | {"settings": _merged(of_services, first.get("settings", {}))},
        further=tuple(
            ServeOptions(**common | entry | {"settings": _merged(of_engines, entry.get("settings", {}))})
            for entry in further
        ),
    )


def _check_flags(arguments: argparse.Namespace) -> None:
    for name in _OF_ONE_MODEL:
        if getattr(arguments, name):
            raise ConfigError(
                f"{flag_of(name)} belongs to one model, and several models can be served; set {name} of the model in the "
                f"file of {MODELS_FLAG}"
            )


def _read(name: str) -> list[Any]:
    """Return the entries of the file. Raises ConfigError if it cannot be read or has another form."""
    try:
        content = yaml.safe_load(Path(name).expanduser().read_text(encoding="utf-8"))
    except OSError as e:
        raise ConfigError(f"{MODELS_FLAG} {name}: the file cannot be read: {e.strerror or e}") from None
    except (yaml.YAMLError, ValueError) as e:
        raise ConfigError(f"{MODELS_FLAG} {name}: the file is not valid YAML: {e}") from None
    entries = content.get("models") if isinstance(content, dict) and len(content) == 1 else None
    if not isinstance(entries, list) or not entries:
        raise ConfigError(
            f"{MODELS_FLAG} {name}: the file must have only the key models, with a list of at least one mapping"
        )
    return entries


def _entry(entry: Any, where: str) -> dict[str, Any]:
    """Return the fields of ``ServeOptions`` that an entry of the file sets. ``where`` names the entry in errors."""
    if not isinstance(entry, dict) or not entry.get("model"):
        raise ConfigError(f"{where} must be a mapping with the key model")
    for key in entry:
        if key not in _KEYS:
            raise ConfigError(f"{where} has the key {key!r}; known: {', '.join(_KEYS)}{nearest(str(key), _KEYS)}")
    fields = dict(entry)
    if isinstance(names := fields.get("served_model_name"), str):
        fields["served_model_name"] = [names]
    adapters, directory, texts = (fields.pop(key, None) for key in ("lora", "lora_directory", "set"))
    for setting in settings_of(ServeOptions):
        if setting.kind.is_size and setting.key in fields:
            fields[setting.key] = parse_bytes(fields[setting.key], key=f"{where}.{setting.key}")
    try:
        msgspec.convert(fields, ServeOptions)
        given = msgspec.convert({"lora": adapters or {}, "set": texts or []}, _Texts)
    except msgspec.ValidationError as e:
        raise ConfigError(f"{where}: {e}") from None
    fields = {name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()}
    return fields | {
        "lora": parse_adapters([f"{name}={path}" for name, path in given.lora.items()]),
        "lora_directory": parse_directory(directory or ""),
        "settings": _own_settings(given.set, where),
    }


class _Texts(msgspec.Struct):
    lora: dict[str, str]
    set: list[str]


def _own_settings(texts: list[str], where: str) -> dict[str, dict[str, Any]]:
    settings = parse_settings(texts)
    for service, values in settings.items():
        for key in values:
            if service != "engine" and not (service == "frontend" and key.startswith(_SECTIONS)):
                raise ConfigError(
                    f"{where}.set has {service}.{key}, which all models share; use the flag --set for it. A model may set "
                    "engine.*, frontend.model.* and frontend.lora.*"
                )
    return settings


def _merged(first: Mapping[str, Mapping[str, Any]], then: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    return {service: {**first.get(service, {}), **then.get(service, {})} for service in {**first, **then}}
