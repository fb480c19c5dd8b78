"""Build hook that generates ``sync_client.py``, the client for threads, from ``async_client.py``."""

import re
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

_PACKAGE = "penstock_client"
_DOCSTRING = '"""Client for threads, generated from ``async_client.py`` by ``build_sync_client.py``."""'
_RULES = (
    (r"await (\S+)\.read\(\)", r"next(\1, EOF)"),
    (r"\b(async|await) ", ""),
    (r"__a(enter|exit|next)__", r"__\1__"),
    (r"(?<!`)Async(?=[A-Z])|\baio[._]|Aio", ""),
)


def synchronous(source: str) -> str:
    """Return the source without ``async`` and ``await``.

    Names in backquotes do not change, because docstrings mention both clients.
    """
    for pattern, replacement in _RULES:
        source = re.sub(pattern, replacement, source)
    return _DOCSTRING + source[source.index("\n") :]


class MakeSyncClient(BuildHookInterface[Any]):
    """Generates ``sync_client.py`` in the folder of ``async_client.py``."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:  # noqa: ARG002 - hatchling's signature
        """Write the module ``sync_client.py``, and register it as a build artifact."""
        package = Path(self.root) / _PACKAGE
        source = (package / "async_client.py").read_text(encoding="utf-8")
        (package / "sync_client.py").write_text(synchronous(source), encoding="utf-8")
        build_data["artifacts"].append(f"{_PACKAGE}/sync_client.py")
