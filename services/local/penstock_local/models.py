"""``penstock models`` and ``penstock pull``: the models in this machine's cache of the Hugging Face hub."""

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from penstock_common.errors import ConfigError, PenstockError
from penstock_local.hub import check_hub

EXIT_FAILED = 1
_PATTERNS = ("*.json", "*.safetensors", "*.jinja", "*.txt", "*.model")
"""Files of a model that engines and frontends read."""
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tiktoken.model", "vocab.json", "vocab.txt")
"""Files of which at least one is there: the frontend reads the first, and makes it of the others where it can."""


class CachedModel(msgspec.Struct, frozen=True, kw_only=True):
    """A model of the cache. ``size``: bytes of all its revisions. ``reason``: why it cannot be served; empty: it can."""

    name: str
    size: int
    reason: str


class PullError(PenstockError):
    """A model could not be downloaded."""


def models(*, as_json: bool) -> int:
    """Print the models of the cache. Returns the exit code."""
    found = cached_models()
    if as_json:
        sys.stdout.write(msgspec.json.encode(found).decode() + "\n")
        return 0
    if not found:
        sys.stderr.write("no models are cached; penstock pull MODEL downloads one\n")
        return 0
    width = max(len(model.name) for model in found)
    for model in found:
        sys.stdout.write(f"{model.name:<{width}}  {size_text(model.size):>9}  {model.reason or 'can be served'}\n")
    return 0


def cached_models() -> Sequence[CachedModel]:
    """The models of the cache, by name. A cache that is not there has none."""
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
        reason = why_not(newest.snapshot_path) if newest is not None else "nothing of it was downloaded"
        found.append(CachedModel(name=repository.repo_id, size=repository.size_on_disk, reason=reason))
    return sorted(found, key=lambda model: model.name)


def why_not(folder: Path) -> str:
    """Why the files of a directory do not make a model that can be served; empty: they do, as far as they show.

    Whether an engine knows the architecture, and has the memory, is known when it loads it.
    """
    if not (folder / "config.json").is_file():
        return "it has no config.json"
    if not any((folder / name).is_file() for name in _TOKENIZERS):
        return "it has no tokenizer"
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = set(json.loads(index.read_bytes())["weight_map"].values())
        except (ValueError, KeyError, AttributeError, TypeError):
            return f"{index.name} cannot be read"
        missing = sum(not (folder / name).is_file() for name in names)
        return f"{missing} of {len(names)} files of weights are missing" if missing else ""
    return "" if next(folder.glob("*.safetensors"), None) is not None else "it has no weights in safetensors"


def pull(name: str, *, revision: str) -> int:
    """Download a model into the cache, with bars on a terminal, and print its directory. Returns the exit code.

    What is there already is not downloaded again. Raises ConfigError for a model that there is not, PullError for a download
    that failed.
    """
    if Path(name).is_dir():
        raise ConfigError(f"model {name}: it is a directory, which penstock serve takes as it is")
    if not sys.stderr.isatty():
        os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"  # read when the library is imported
    check_hub(name, revision)
    from huggingface_hub import constants, snapshot_download

    try:
        folder = snapshot_download(name, revision=revision or None, allow_patterns=list(_PATTERNS))
    except Exception as e:  # whatever its HTTP library raises, or a full disk
        offline = ", and HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else ""
        raise PullError(f"model {name} could not be downloaded{offline}: {str(e).strip() or type(e).__name__}") from e
    if reason := why_not(Path(folder)):
        raise PullError(f"model {name} was downloaded, but cannot be served: {reason}")
    sys.stdout.write(f"{folder}\n")
    return 0


def size_text(size: int) -> str:
    """Bytes as people read them."""
    for unit, each in (("GiB", 1024**3), ("MiB", 1024**2), ("KiB", 1024)):
        if size >= each:
            return f"{size / each:.1f} {unit}"
    return f"{size} B"
