"""The files a gateway needs to build a model's tokenizer and chat template, in one archive."""

import asyncio
import hashlib
import io
import zipfile
from pathlib import Path
from typing import NamedTuple

from penstock_common.errors import NotFound
from penstock_common.input_files import read_input

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
