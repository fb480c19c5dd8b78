"""The directory each of whose subdirectories is a LoRA adapter of that name."""

import asyncio
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TypeAlias

from penstock_common.observability.logging import get_logger
from penstock_frontend.engine.adapters import Adapters

_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"

Stamp: TypeAlias = "tuple[tuple[int, int, int] | None, ...]"
"""What tells whether files were replaced: inode, size and time of the last change of each; None for one that is missing."""


class AdapterDirectory:
    """``look`` once before requests are served, then ``run``: names come and go with the subdirectories. What cannot be looked
    into changes nothing.
    """

    def __init__(self, path: str, interval: float, adapters: Adapters) -> None:
        """``interval``: seconds between two looks."""
        self._path = Path(path)
        self._interval = interval
        self._adapters = adapters
        self._found: Mapping[str, Stamp] = {}
        self._unreadable = False

    async def run(self) -> None:
        """Look again and again."""
        while True:
            await asyncio.sleep(self._interval)
            await self.look()

    async def look(self) -> None:
        """Follow what is there now."""
        try:
            found = await asyncio.to_thread(adapters_in, self._path)
        except OSError as e:
            if not self._unreadable:
                self._warn(f"cannot be read, and the names stay as they are: {e.strerror or e}")
            self._unreadable = True
            return
        self._unreadable = False
        if found != self._found:
            self._follow(found)

    def _follow(self, found: Mapping[str, Stamp]) -> None:
        changed = {name for name, stamp in self._found.items() if found.get(name, stamp) != stamp}
        come, gone = sorted(found.keys() - self._found.keys()), sorted(self._found.keys() - found.keys())
        self._found = found
        left_out = self._adapters.follow_directory(
            {name: self._at(name) for name in found}, {name: self._at(name) for name in changed}
        )
        get_logger().info("LoRA adapters in lora.directory", come=come, gone=gone, changed=sorted(changed))
        if left_out:
            self._warn(f"has names that are too many, or cannot be names: {', '.join(left_out[:8])}")

    def _at(self, name: str) -> str:
        return str(self._path / name)

    def _warn(self, problem: str) -> None:
        get_logger().warning(f"lora.directory {problem}", directory=str(self._path))


def adapters_in(path: Path) -> dict[str, Stamp]:
    """By name of the subdirectory, the adapters in ``path``; those whose names begin with a dot are none. Raises OSError."""
    with os.scandir(path) as entries:
        names = [entry.name for entry in entries if not entry.name.startswith(".")]
    stamps = {name: (_stamp(path / name / _CONFIG), _stamp(path / name / _WEIGHTS)) for name in names}
    return {name: stamp for name, stamp in stamps.items() if stamp[0] is not None}


def _stamp(file: Path) -> tuple[int, int, int] | None:
    try:
        found = file.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns
