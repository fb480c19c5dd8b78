"""The directory each of whose subdirectories is a LoRA adapter of that name."""

import asyncio
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TypeAlias

from penstock_common.errors import ConfigError
from penstock_common.observability.logging import get_logger
from penstock_frontend.dispatch.adapters import Adapters

_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_SHOWN = 8
"""Names that a log line has."""

Stamp: TypeAlias = "tuple[tuple[int, int, int] | None, ...]"
"""What tells whether files were replaced: inode, size and time of the last change of each; None for one that is missing."""


class AdapterDirectory:
    """Gives an adapter's name to each subdirectory. ``begin`` before requests are served, then ``run``.

    If the directory cannot be read, all names stay as they are. If a subdirectory cannot be looked into, its name stays or stays
    away, and the others are followed.
    """

    def __init__(self, path: str, interval: float, adapters: Adapters) -> None:
        """``interval``: seconds between two looks."""
        self._path = Path(path)
        self._interval = interval
        self._adapters = adapters
        self._found: Mapping[str, Stamp] = {}
        self._unreadable = False
        self._problems: Mapping[str, str] = {}

    async def run(self) -> None:
        """Look again and again."""
        while True:
            await asyncio.sleep(self._interval)
            await self.look()

    async def begin(self) -> None:
        """Look for the first time. Raises ConfigError if an adapter has a name of ``model.aliases``."""
        await self.look()
        for name, target in self._adapters.aliases.items():
            if name in self._found:
                raise ConfigError(
                    f"model.aliases has {name!r} for {target!r}, but lora.directory has an adapter of that name: {self._at(name)}"
                )

    async def look(self) -> None:
        """Follow what is there now."""
        try:
            found, problems = await asyncio.to_thread(adapters_in, self._path)
        except OSError as e:
            if not self._unreadable:
                self._warn(f"cannot be read, and the names stay as they are: {e.strerror or e}")
            self._unreadable = True
            return
        self._unreadable = False
        found |= {name: self._found[name] for name in problems if name in self._found}
        if found != self._found:
            self._follow(found)
        if problems != self._problems:
            self._problems = problems
            self._warn_of(problems)

    def _follow(self, found: Mapping[str, Stamp]) -> None:
        changed = {name for name, stamp in self._found.items() if found.get(name, stamp) != stamp}
        come, gone = sorted(found.keys() - self._found.keys()), sorted(self._found.keys() - found.keys())
        self._found = found
        left_out = self._adapters.follow_directory(
            {name: self._at(name) for name in found}, {name: self._at(name) for name in changed}
        )
        get_logger().info("LoRA adapters in lora.directory", come=come, gone=gone, changed=sorted(changed))
        if left_out:
            self._warn(f"has names that are too many, taken, or cannot be names: {', '.join(left_out[:_SHOWN])}")

    def _at(self, name: str) -> str:
        return str(self._path / name)

    def _warn_of(self, problems: Mapping[str, str]) -> None:
        if problems:
            shown = "; ".join(f"{name}: {problems[name]}" for name in sorted(problems)[:_SHOWN])
            self._warn(f"has {len(problems)} subdirectories that cannot be looked into: {shown}")

    def _warn(self, problem: str) -> None:
        get_logger().warning(f"lora.directory {problem}", directory=str(self._path))


def adapters_in(path: Path) -> tuple[dict[str, Stamp], dict[str, str]]:
    """Return the adapters in ``path``, and the problems of subdirectories that cannot be looked into, both by name.

    Names that begin with a dot are neither. Raises OSError if ``path`` itself cannot be read.
    """
    with os.scandir(path) as entries:
        names = [entry.name for entry in entries if not entry.name.startswith(".")]
    found: dict[str, Stamp] = {}
    problems: dict[str, str] = {}
    for name in names:
        try:
            config, weights = (_stamp(path / name / file) for file in (_CONFIG, _WEIGHTS))
        except OSError as e:
            problems[name] = f"{e.strerror}: {e.filename}"
        else:
            if config is not None:
                found[name] = config, weights
    return found, problems


def _stamp(file: Path) -> tuple[int, int, int] | None:
    try:
        found = file.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns
