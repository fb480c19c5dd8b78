"""Description of the model for gateways: the model card (metadata), and an archive of the tokenizer files."""

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

# The code below reads metadata of the model, for clients that build prompts and parse outputs themselves.

_ADVERTISED = (*SAMPLING_DEFAULTS, "repetition_penalty")


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    """Metadata of a model, from the model's files.

    ``folder`` is the directory of the files. ``sampling_defaults`` are the default sampling parameters of the model
    that differ from Penstock's defaults. ``pad_token_id`` and ``bos_token_id`` are 0 if the model has no such token.
    """

    folder: Path
    model_type: str = ""
    architectures: tuple[str, ...] = ()
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int = 0
    bos_token_id: int = 0
    sampling_defaults: dict[str, Any] = {}


def load_model_card(config: ModelConfig, generation_config: Mapping[str, Any]) -> ModelCard:
    """Return the metadata of the model from its files. Raises ConfigError if config.json exists, but cannot be read."""
    folder = resolve(config)
    described = read_json(folder / "config.json")
    # Multimodal models have the configuration of their language model in a separate section.
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
"""Earliest date that a zip archive can store. All files in the archive get this date, so that equal files give equal
archives.
"""


class Bundle(NamedTuple):
    """Zip archive of the tokenizer files, and the SHA-256 of the archive in hexadecimal."""

    data: bytes
    sha256: str


class TokenizerBundle:
    """Archive of the tokenizer files. A thread builds the archive when it is first needed.

    The archive is then kept, because the files do not change.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._building: asyncio.Task[Bundle] | None = None

    async def get(self) -> Bundle:
        """Return the archive of the tokenizer files. Raises NotFound if the model has no tokenizer files."""
        if self._building is None or (self._building.done() and self._building.exception() is not None):
            self._building = asyncio.create_task(asyncio.to_thread(_build, self._folder))
        # Callers that ask at the same time share one build. If one caller is cancelled, the build must continue for the
        # others.
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
