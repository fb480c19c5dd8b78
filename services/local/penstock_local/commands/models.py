"""Implementation of ``penstock models`` and ``penstock pull``, which show and fill this machine's Hugging Face cache."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from penstock_common import checkpoint
from penstock_common.errors import ConfigError, PenstockError
from penstock_local.serving.hub_check import check_hub

if TYPE_CHECKING:
    from rich.table import Table

EXIT_FAILED = 1
_SERVED = "can be served"
_PATTERNS = ("*.json", "*.safetensors", "*.jinja", "*.txt", "*.model")
"""File patterns of a model that engines and frontends read."""


class CachedModel(msgspec.Struct, frozen=True, kw_only=True):
    """A model of the cache.

    Attributes:
        size: Size of all revisions of the model, in bytes.
        reason: Reason why the model cannot be served; empty if it can be served.
    """

    name: str
    size: int
    reason: str


class PullError(PenstockError):
    """Error for a model that could not be downloaded."""


def models(*, as_json: bool) -> int:
    """Print the models of the cache. Returns the exit code."""
    found = cached_models()
    if as_json:
        sys.stdout.write(msgspec.json.encode(found).decode() + "\n")
        return 0
    if not found:
        sys.stderr.write("no models are cached; download one with penstock pull MODEL\n")
        return 0
    if sys.stdout.isatty():
        from rich.console import Console

        Console(highlight=False).print(models_table(found))
        return 0
    width = max(len(model.name) for model in found)
    for model in found:
        sys.stdout.write(f"{model.name:<{width}}  {size_text(model.size):>9}  {model.reason or _SERVED}\n")
    return 0


def models_table(found: Sequence[CachedModel]) -> "Table":
    """Return a table for a terminal: names wrap, and sizes stay on one line."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(overflow="fold")
    table.add_column(justify="right", no_wrap=True)
    table.add_column(overflow="fold")
    for model in found:
        table.add_row(Text(model.name), size_text(model.size), Text(model.reason or _SERVED))
    return table


def cached_models() -> Sequence[CachedModel]:
    """Return the models of the cache, sorted by name. Empty if there is no cache."""
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        repositories = scan_cache_dir().repos
    except CacheNotFound:
        return []
    found = []
    for repository in repositories:
        if repository.repo_type != "model":
            continue
        main = next((each for each in repository.revisions if "main" in each.refs), None)
        newest = main or max(repository.revisions, key=lambda each: each.last_modified, default=None)
        reason = why_not(newest.snapshot_path) if newest is not None else "no file was downloaded"
        found.append(CachedModel(name=repository.repo_id, size=repository.size_on_disk, reason=reason))
    return sorted(found, key=lambda model: model.name)


def why_not(folder: Path) -> str:
    """Return the reason why the files of a directory cannot be served as a model.

    Empty if the files show no problem. The reason is the same as in ``penstock serve``. The engine checks architecture
    and memory when it loads the model.
    """
    said = checkpoint.problem(str(folder)).removeprefix(repr(str(folder)))
    return said.removeprefix(": ") if said.startswith(":") else f"it{said}" if said else ""


def pull(name: str, *, revision: str) -> int:
    """Download a model into the cache and print its directory.

    Shows progress bars on a terminal. Returns the exit code. Files that are already in the cache are not downloaded
    again.

    Raises:
        ConfigError: The model does not exist.
        PullError: The download failed.
    """
    if Path(name).is_dir():
        raise ConfigError(f"model {name}: this is a local directory; penstock serve can use it directly")
    if not sys.stderr.isatty():
        os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"  # The library reads this variable when it is imported.
    check_hub(name, revision)
    from huggingface_hub import constants, snapshot_download

    try:
        folder = snapshot_download(name, revision=revision or None, allow_patterns=list(_PATTERNS))
    except Exception as e:  # Network errors of the hub's HTTP library, or a full disk.
        offline = ", and HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else ""
        raise PullError(f"model {name} could not be downloaded{offline}: {str(e).strip() or type(e).__name__}") from e
    if reason := why_not(Path(folder)):
        raise PullError(f"model {name} was downloaded, but cannot be served: {reason}")
    sys.stdout.write(f"{folder}\n")
    return 0


def size_text(size: int) -> str:
    """Format a number of bytes for people."""
    for unit, each in (("GiB", 1024**3), ("MiB", 1024**2), ("KiB", 1024)):
        if size >= each:
            return f"{size / each:.1f} {unit}"
    return f"{size} B"
