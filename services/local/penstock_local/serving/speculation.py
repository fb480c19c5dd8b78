"""Speculation as users ask for it: flags of ours, vLLM's ``speculative_config``, and what is wrong with either."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from penstock_common.checkpoint import looks_like_a_path, no_directory
from penstock_common.config.loader import build
from penstock_common.errors import ConfigError, nearest

METHODS = ("prediction", "ngram", "suffix", "draft_model", "eagle", "eagle3")
WITH_MODEL = ("draft_model", "eagle", "eagle3")
FLAG, MODEL_FLAG, TOKENS_FLAG = "--speculative", "--speculative-model", "--speculative-tokens"
CONFIG_FLAG = "--speculative-config"
CONFIG_NAME = "speculative_config"
_INSTEAD = {
    "suffix_decoding_max_cached_requests": "suffix_decoding_cache_bytes bounds what is remembered",
    "disable_by_batch_size": "drafts give way by themselves where steps are full",
    "speculative_disable_by_batch_size": "drafts give way by themselves where steps are full",
    "rejection_sample_method": "drafts change no token, so there is nothing to choose",
    "draft_sample_method": "draft_sampling is greedy, coupled or auto",
    "draft_tensor_parallel_size": "what drafts is computed by one worker",
    "num_lookahead_slots": "num_speculative_tokens is the number of tokens",
}
"""What there is in place of vLLM's keys that are not here."""


def section_of(given: Mapping[str, Any], *, name: str = CONFIG_NAME) -> dict[str, Any]:
    """The section ``speculative`` of an engine's configuration, from vLLM's keys. Raises ConfigError for a key that is not taken,
    for an unknown method, and for what does not fit together.
    """
    from penstock_enginecore.config.speculative import SpeculativeConfig

    known = SpeculativeConfig.__struct_fields__
    for key in given:
        if key not in known:
            instead = f": {_INSTEAD[key]}" if key in _INSTEAD else nearest(str(key), known)
            raise ConfigError(f"{name} has no key {key!r}{instead}; it takes {', '.join(known)}")
    section = {key: value for key, value in given.items() if value is not None}
    if not section.get("method"):
        raise ConfigError(f"{name}.method is not set; it must be one of {', '.join(METHODS)}")
    check_method(section["method"], f"{name}.method")
    check_section(section)
    return section


def parse_config(text: str) -> dict[str, Any]:
    """The section of a JSON object of vLLM's keys. Raises ConfigError."""
    try:
        given = json.loads(text)
    except (ValueError, RecursionError) as e:
        raise ConfigError(f"{CONFIG_FLAG} is no JSON: {e}") from None
    if not isinstance(given, dict):
        raise ConfigError(
            f'{CONFIG_FLAG} must be a JSON object, e.g. \'{{"method": "ngram", "num_speculative_tokens": 5}}\''
        )
    return section_of(given, name=CONFIG_FLAG)


def of_flags(method: str, model: str, tokens: int | None) -> dict[str, Any]:
    """The section of the three flags; empty where none is given. Raises ConfigError for what does not fit together."""
    if not method:
        for flag, value in ((MODEL_FLAG, model), (TOKENS_FLAG, tokens)):
            if value:
                raise ConfigError(f"{flag} is {value} without {FLAG}; give a method: {', '.join(METHODS)}")
        return {}
    check_method(method, FLAG)
    if method in WITH_MODEL and not model:
        raise ConfigError(f"{FLAG} is {method}, which needs {MODEL_FLAG}: the directory or the hub id of what drafts")
    if model and method not in WITH_MODEL:
        raise ConfigError(f"{MODEL_FLAG} is {model} with {FLAG} {method}; only {', '.join(WITH_MODEL)} have one")
    section: dict[str, Any] = {"method": method}
    if model:
        section["model"] = str(Path(model).expanduser()) if Path(model).expanduser().is_dir() else model
    if tokens is not None:
        section["num_speculative_tokens"] = tokens
    return section


def check_method(method: object, name: str) -> None:
    """Raise ConfigError for one that there is not."""
    if method not in METHODS:
        raise ConfigError(f"{name} is {method!r}; known: {', '.join(METHODS)}{nearest(str(method), METHODS)}")


def check_section(section: Mapping[str, Any]) -> None:
    """Raise ConfigError for what the engine would refuse before it loads anything: values out of range, keys that do not fit."""
    if not section:
        return
    from penstock_enginecore.config.speculative import SpeculativeConfig

    class Engine(msgspec.Struct, frozen=True, kw_only=True):
        speculative: SpeculativeConfig = SpeculativeConfig()

    build(Engine, {"speculative": dict(section)})


def check_drafting_model(section: Mapping[str, Any]) -> None:
    """Raise ConfigError where the files of what drafts are not there, or not all that it takes. An id on the hub is looked up."""
    model = str(section.get("model") or "")
    if not model:
        return
    path = Path(model).expanduser()
    if path.is_dir():
        _check_files(path)
        return
    if path.exists() or looks_like_a_path(model):
        raise ConfigError(f"speculative.model is {model}: {no_directory(model)}")
    from penstock_local.serving.hub_check import check_hub

    try:
        check_hub(model, str(section.get("revision") or ""))
    except ConfigError as e:
        raise ConfigError(f"speculative.model: {e}") from None


def _check_files(path: Path) -> None:
    if not (path / "config.json").is_file():
        raise ConfigError(f"speculative.model is {path}: it has no config.json")
    if not any(path.glob("*.safetensors")):
        pickled = next((each.name for kind in ("*.bin", "*.pt", "*.pth") for each in path.glob(kind)), "")
        why = f"; {pickled} may hold code and is not read: convert it" if pickled else ""
        raise ConfigError(f"speculative.model is {path}: it has no weights in safetensors{why}")
