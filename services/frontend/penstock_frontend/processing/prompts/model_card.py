"""What a model's files say of it, for clients that build prompts and read outputs themselves."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from penstock_frontend.config import ModelConfig
from penstock_frontend.processing.prompts.sampling_params import SAMPLING_DEFAULTS, model_defaults
from penstock_frontend.processing.prompts.tokenizer import read_json, resolve

_ADVERTISED = (*SAMPLING_DEFAULTS, "repetition_penalty")


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    """``folder``: where the files are. ``sampling_defaults``: the model's own, where they differ from ours.

    ``pad_token_id`` and ``bos_token_id`` are 0 where the model names none.
    """

    folder: Path
    model_type: str = ""
    architectures: tuple[str, ...] = ()
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int = 0
    bos_token_id: int = 0
    sampling_defaults: dict[str, Any] = {}


def load_model_card(config: ModelConfig, generation_config: Mapping[str, Any]) -> ModelCard:
    """Read config.json, where there is one. Raises ConfigError when it cannot be read."""
    folder = resolve(config)
    described = read_json(folder / "config.json")
    # A model of several parts describes the one that generates in a section of its own.
    text = {**described, **(described.get("text_config") or {})}
    ends = [*_ids(text.get("eos_token_id")), *_ids(generation_config.get("eos_token_id"))]
    defaults = model_defaults(generation_config)
    return ModelCard(
        folder=folder,
        model_type=str(described.get("model_type", "")),
        architectures=tuple(map(str, described.get("architectures") or ())),
        eos_token_ids=tuple(dict.fromkeys(ends)),
        pad_token_id=_first(text.get("pad_token_id")),
        bos_token_id=_first(text.get("bos_token_id")),
        sampling_defaults={name: defaults[name] for name in _ADVERTISED if name in defaults},
    )


def _ids(value: Any) -> list[int]:
    return [i for i in (value if isinstance(value, list) else [value]) if isinstance(i, int)]


def _first(value: Any) -> int:
    return next(iter(_ids(value)), 0)
