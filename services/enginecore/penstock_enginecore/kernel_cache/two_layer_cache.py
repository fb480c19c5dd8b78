"""Triton's cache in two layers: kernels that were compiled before, which are never written to, and those that have to be now."""

import json
import logging
import os
import tempfile
from pathlib import Path
from typing import Any, ClassVar

from triton import knobs
from triton.runtime.cache import FileCacheManager

from penstock_enginecore.kernel_cache.lookups import Lookups

# Triton's cache in two layers: kernels that were compiled before, which are never written to, and those that have to be now.

logger = logging.getLogger(__name__)


class LayeredCache(FileCacheManager):  # type: ignore[misc]
    """A directory per key, as Triton's own, below ``shipped`` and, for what is not there, below Triton's own place. Kernels are
    looked up by the group of files that each is.
    """

    shipped: ClassVar[Path]
    lookups: ClassVar[Lookups]

    def __init__(self, key: str, override: bool = False, dump: bool = False) -> None:
        self._arguments = key, override, dump
        self._before = self.shipped / key
        self._has_place = False
        self.key = key

    def get_file(self, filename: str) -> str | None:
        """The path of a file."""
        before = self._before / filename
        return str(before) if before.is_file() else self._own().get_file_here(filename)

    def get_group(self, filename: str) -> dict[str, str] | None:
        """The paths of a group by name, wherever it was when it was compiled."""
        group = self._shipped_group(filename)
        if group is None:
            group = super(LayeredCache, self._own()).get_group(filename)
        if group:
            self.lookups.found += 1
        else:
            self.lookups.compiled += 1
        return group

    def put(self, data: Any, filename: str, binary: bool = True) -> str:
        """Into Triton's own place."""
        return str(super(LayeredCache, self._own()).put(data, filename, binary))

    def get_file_here(self, filename: str) -> str | None:
        """A file of Triton's own place."""
        found: str | None = super().get_file(filename)
        return found

    def _own(self) -> "LayeredCache":
        """With Triton's own place made."""
        if not self._has_place:
            super().__init__(*self._arguments)
            self._has_place = True
        return self

    def _shipped_group(self, filename: str) -> dict[str, str] | None:
        group = self._before / f"__grp__{filename}"
        if not group.is_file():
            return None
        paths = json.loads(group.read_bytes())["child_paths"]
        found = {name: self._before / Path(path).name for name, path in paths.items()}
        return {name: str(path) for name, path in found.items()} if all(map(Path.is_file, found.values())) else None


def use_cache(shipped: Path) -> Lookups:
    """Have Triton look below ``shipped`` first, from now on in this process. What it compiles goes where it would have gone, or,
    if that cannot be written to, to a temporary directory.
    """
    LayeredCache.shipped, LayeredCache.lookups = shipped, Lookups()
    knobs.cache.manager_class = LayeredCache
    place = Path(knobs.cache.dir)
    try:
        place.mkdir(parents=True, exist_ok=True)
        writable = os.access(place, os.W_OK)
    except OSError:
        writable = False
    if not writable:
        knobs.cache.dir = tempfile.mkdtemp(prefix="penstock-kernels-")
        logger.warning("%s cannot be written to: kernels are compiled into %s", place, knobs.cache.dir)
    return LayeredCache.lookups
