"""Describes a model to gateways: its model card, and its tokenizer files in one archive."""

import asyncio
import hashlib
import io
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from penstock_common.errors import NotFound
from penstock_common.files import read_input
from penstock_frontend.config import ModelConfig
from penstock_frontend.processing.prompts.sampling_params import SAMPLING_DEFAULTS, model_defaults
from penstock_frontend.processing.prompts.tokenizer import read_json, resolve

# What a model's files say of it, for clients that build prompts and read outputs themselves.

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


_NAMES = frozenset(
    {
        "tokenizer.json",
        "tokenizer_config.json",
        "config.json",
        "generation_config.json",
        "special_tokens_map.json",
        "vocab.json",
        "merges.txt",
        "chat_template.json",
        "preprocessor_config.json",
        "processor_config.json",
        "video_preprocessor_config.json",
    }
)
_SUFFIXES = (".model", ".tiktoken", ".jinja")
_EPOCH = (1980, 1, 1, 0, 0, 0)
"""The oldest date that a zip archive can tell: one for all files, so that equal files make equal archives."""


class Bundle(NamedTuple):
    """A zip archive and its SHA-256 in hex."""

    data: bytes
    sha256: str


class TokenizerBundle:
    """Built when it is first asked for, off the event loop, and kept: a model's files do not change while it is served."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._building: asyncio.Task[Bundle] | None = None

    async def get(self) -> Bundle:
        """The archive. Raises NotFound for a model without such files."""
        if self._building is None or (self._building.done() and self._building.exception() is not None):
            self._building = asyncio.create_task(asyncio.to_thread(_build, self._folder))
        # Those who ask while it is built share it, and one that goes away does not take it from the others.
        return await asyncio.shield(self._building)


def _build(folder: Path) -> Bundle:
    files = sorted(f for f in folder.iterdir() if f.is_file() and (f.name in _NAMES or f.suffix in _SUFFIXES))
    if not files:
        raise NotFound(f"{folder} has no tokenizer files")
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for file in files:
            entry = zipfile.ZipInfo(file.name, _EPOCH)
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, read_input(file))
    data = buffer.getvalue()
    return Bundle(data, hashlib.sha256(data).hexdigest())
