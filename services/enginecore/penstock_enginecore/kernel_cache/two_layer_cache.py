"""Triton cache with two layers: a read-only directory with kernels that were compiled in advance, and a directory with
kernels that were compiled when needed.
"""

import json
import logging
import os
import tempfile
from pathlib import Path
from typing import Any, ClassVar

from triton import knobs
from triton.runtime.cache import FileCacheManager

from penstock_enginecore.kernel_cache.lookups import Lookups

logger = logging.getLogger(__name__)


class LayeredCache(FileCacheManager):  # type: ignore[misc]
    """Triton cache that looks in the directory ``shipped`` first and then in Triton's own directory. Both directories
    have one folder for each key. Hits and misses are counted by group of files, because the files of one kernel are a
    group.
    """

    shipped: ClassVar[Path]
    lookups: ClassVar[Lookups]

    def __init__(self, key: str, override: bool = False, dump: bool = False) -> None:
        self._arguments = key, override, dump
        self._before = self.shipped / key
        self._has_place = False
        self.key = key

    def get_file(self, filename: str) -> str | None:
        """Return the path of a file in one of the two directories, or None if neither has the file."""
        before = self._before / filename
        return str(before) if before.is_file() else self._own().get_file_here(filename)

    def get_group(self, filename: str) -> dict[str, str] | None:
        """Return the paths of a group's files by name, from the directory that has the group, or None if neither has
        it.
        """
        group = self._shipped_group(filename)
        if group is None:
            group = super(LayeredCache, self._own()).get_group(filename)
        if group:
            self.lookups.found += 1
        else:
            self.lookups.compiled += 1
        return group

    def put(self, data: Any, filename: str, binary: bool = True) -> str:
        """Write a file into Triton's own directory."""
        return str(super(LayeredCache, self._own()).put(data, filename, binary))

    def get_file_here(self, filename: str) -> str | None:
        """Return the path of a file in Triton's own directory, or None if this directory does not have the file."""
        found: str | None = super().get_file(filename)
        return found

    def _own(self) -> "LayeredCache":
        """Create the folder of this cache's key in Triton's own directory, and return this cache."""
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
    """Make Triton look for kernels in the directory ``shipped`` first, from now on in this process.

    Triton still compiles into its own directory, or into a temporary directory if that directory is not writable.
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
        logger.warning(
            "the kernel cache directory %s is not writable, so compiled kernels are stored in %s",
            place,
            knobs.cache.dir,
        )
    return LayeredCache.lookups
