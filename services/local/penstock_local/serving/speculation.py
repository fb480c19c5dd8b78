"""Speculative decoding options: parsing and checks of Penstock's flags and of vLLM's ``speculative_config``."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from penstock_common.checkpoint import looks_like_a_path, no_directory
from penstock_common.config.loader import build
from penstock_common.errors import ConfigError, nearest

METHODS = ("prediction", "ngram", "suffix", "draft_model", "eagle", "eagle3", "mtp")
WITH_MODEL = ("draft_model", "eagle", "eagle3")
FLAG, MODEL_FLAG, TOKENS_FLAG = "--speculative", "--speculative-model", "--speculative-tokens"
CONFIG_FLAG = "--speculative-config"
CONFIG_NAME = "speculative_config"
_INSTEAD = {
    "suffix_decoding_max_cached_requests": "use suffix_decoding_cache_bytes to limit the size of the cache",
    "disable_by_batch_size": "steps that are full drop drafts automatically",
    "speculative_disable_by_batch_size": "steps that are full drop drafts automatically",
    "rejection_sample_method": "drafts never change the output, so there is nothing to choose",
    "draft_sample_method": "use draft_sampling: greedy, coupled or auto",
    "draft_tensor_parallel_size": "one worker runs the draft model",
    "num_lookahead_slots": "use num_speculative_tokens for the number of tokens",
}
"""Hints for keys of vLLM that Penstock does not have."""


def section_of(given: Mapping[str, Any], *, name: str = CONFIG_NAME) -> dict[str, Any]:
    """Build the ``speculative`` section of an engine configuration from vLLM's keys.

    Raises:
        ConfigError: A key or the method is unknown, or the values do not match each other.
    """
    from penstock_enginecore.config.speculative import SpeculativeConfig

    known = SpeculativeConfig.__struct_fields__
    for key in given:
        if key not in known:
            instead = f": {_INSTEAD[key]}" if key in _INSTEAD else nearest(str(key), known)
            raise ConfigError(f"{name} has no key {key!r}{instead}; supported keys: {', '.join(known)}")
    section = {key: value for key, value in given.items() if value is not None}
    if not section.get("method"):
        raise ConfigError(f"{name}.method is not set; it must be one of {', '.join(METHODS)}")
    check_method(section["method"], f"{name}.method")
    check_section(section)
    return section


def parse_config(text: str) -> dict[str, Any]:
    """Build the section from a JSON object with vLLM's keys. Raises ConfigError if the text is not such an object."""
    try:
        given = json.loads(text)
    except (ValueError, RecursionError) as e:
        raise ConfigError(f"{CONFIG_FLAG} is not valid JSON: {e}") from None
    if not isinstance(given, dict):
        raise ConfigError(
            f'{CONFIG_FLAG} must be a JSON object, e.g. \'{{"method": "ngram", "num_speculative_tokens": 5}}\''
        )
    return section_of(given, name=CONFIG_FLAG)


def of_flags(method: str, model: str, tokens: int | None) -> dict[str, Any]:
    """Build the section from the three flags.

    Empty if no flag is given. Raises ConfigError if the flags do not match each other.
    """
    if not method:
        for flag, value in ((MODEL_FLAG, model), (TOKENS_FLAG, tokens)):
            if value:
                raise ConfigError(f"{flag} is {value}, but {FLAG} is not given; give a method: {', '.join(METHODS)}")
        return {}
    check_method(method, FLAG)
    if method in WITH_MODEL and not model:
        raise ConfigError(f"{FLAG} is {method}, which needs {MODEL_FLAG}: the directory or hub id of the draft model")
    if model and method not in WITH_MODEL:
        raise ConfigError(
            f"{MODEL_FLAG} is {model} with {FLAG} {method}; only {', '.join(WITH_MODEL)} use a draft model"
        )
    section: dict[str, Any] = {"method": method}
    if model:
        section["model"] = str(Path(model).expanduser()) if Path(model).expanduser().is_dir() else model
    if tokens is not None:
        section["num_speculative_tokens"] = tokens
    return section


def check_method(method: object, name: str) -> None:
    """Raise ConfigError if the method is unknown."""
    if method not in METHODS:
        raise ConfigError(f"{name} is {method!r}; known: {', '.join(METHODS)}{nearest(str(method), METHODS)}")


def check_section(section: Mapping[str, Any]) -> None:
    """Raise ConfigError if the engine would refuse the section, for values out of range or keys that exclude each
    other.
    """
    if not section:
        return
    from penstock_enginecore.config.speculative import SpeculativeConfig

    class Engine(msgspec.Struct, frozen=True, kw_only=True):
        speculative: SpeculativeConfig = SpeculativeConfig()

    build(Engine, {"speculative": dict(section)})


def check_drafting_model(section: Mapping[str, Any]) -> None:
    """Raise ConfigError if the files of the draft model are missing or incomplete. A hub id is looked up."""
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
        why = f"; {pickled} may contain code and is not read: convert it to safetensors" if pickled else ""
        raise ConfigError(f"speculative.model is {path}: it has no weights in safetensors{why}")
