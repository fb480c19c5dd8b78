"""Agent programs as users run them: their configuration for a server, and the command for one task without a terminal.

They are found on PATH and in the folders of PENSTOCK_AGENTS. The configuration is that of docs/agents.md.
"""

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from tests.fakes.network.alone import PORT

URL = f"http://127.0.0.1:{PORT}"
OPENCODE = {
    "provider": {
        "penstock": {
            "npm": "@ai-sdk/openai-compatible",
            "name": "Penstock",
            "options": {"baseURL": f"{URL}/v1", "apiKey": "none"},
            "models": {"model": {"name": "model", "limit": {"context": 131072, "output": 8192}}},
        }
    },
    "model": "penstock/model",
    "small_model": "penstock/model",
    "permission": {"*": "allow"},
    "autoupdate": False,
    "share": "disabled",
}
CONTINUE = f"""\
name: Penstock
version: 1.0.0
schema: v1
models:
  - name: Penstock
    provider: openai
    model: model
    apiBase: {URL}/v1
    apiKey: none
    roles: [chat, edit, apply]
    capabilities: [tool_use]
"""


class Program(NamedTuple):
    """A program. ``files``: its configuration, by their names in the home folder. ``prepare``: a command before the other one."""

    executable: str
    command: tuple[str, ...]
    files: Mapping[str, str] = {}
    environment: Mapping[str, str] = {}
    prepare: tuple[str, ...] = ()

    def find(self) -> str | None:
        """Return the path of the executable, or None if it is not installed."""
        folders = os.pathsep.join(filter(None, [os.environ.get("PENSTOCK_AGENTS"), os.environ.get("PATH")]))
        return shutil.which(self.executable, path=folders)

    def configure(self, home: Path) -> dict[str, str]:
        """Write the files into an empty home folder and return the program's environment."""
        for name, text in self.files.items():
            file = home / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
        folders = [os.environ.get("PENSTOCK_AGENTS"), os.environ.get("PATH")]
        return {"HOME": str(home), "PATH": os.pathsep.join(filter(None, folders)), "NO_COLOR": "1", **self.environment}


AGENTS = {
    "opencode": Program(
        "opencode",
        ("run", "{task}"),
        files={".config/opencode/opencode.json": json.dumps(OPENCODE)},
        environment={"OPENCODE_DISABLE_MODELS_FETCH": "1"},
    ),
    "continue": Program(
        "cn",
        ("--config", "{home}/config.yaml", "--auto", "-p", "{task}"),
        files={"config.yaml": CONTINUE},
        environment={"CONTINUE_TELEMETRY_ENABLED": "0"},
    ),
    "cline": Program(
        "cline",
        ("-P", "openai-compatible", "-m", "model", "{task}"),
        prepare=("auth", "-p", "openai-compatible", "-k", "none", "-m", "model", "-b", f"{URL}/v1"),
    ),
}
"""By the names of their recorded requests."""
