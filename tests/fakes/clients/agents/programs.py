"""Agent programs as users run them: configured as in docs/guides/agents.md, with the command for one task and no
terminal.

The programs are searched on PATH and in the directories of PENSTOCK_AGENTS.
"""

import os
import re
import shlex
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from tests.documents.pages import ROOT

PAGE = ROOT / "docs/guides/agents.md"
ON_THE_PAGE = {"my-model": "model", "65536": "1000000"}
"""Words to replace in the page's commands, for a scripted model. Its tokenizer gives four times as many tokens as
usual.
"""


class Program(NamedTuple):
    """A program. ``files``: names of files in its home folder, with the headings and languages of their blocks on the
    page.

    ``exports``: the heading of the block that sets its environment. ``prepares``: the heading of the command that goes
    first.
    """

    executable: str
    command: tuple[str, ...]
    files: Mapping[str, tuple[str, str]] = {}
    exports: str = ""
    prepares: str = ""
    environment: Mapping[str, str] = {}

    def find(self) -> str | None:
        """Return the path of the executable, or None if it is not installed."""
        return shutil.which(self.executable, path=_search_path())

    def preparation(self) -> list[str]:
        """Return the words of the command to run first, without the program's name; empty if there is no such command."""
        return shlex.split(_block(self.prepares, "sh"))[1:] if self.prepares else []

    def configure(self, home: Path) -> dict[str, str]:
        """Write the files into the home folder and return the program's environment."""
        for name, (heading, language) in self.files.items():
            file = home / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(_block(heading, language), encoding="utf-8")
        exported = re.findall(r"export (\w+)=(\S+)", _block(self.exports, "sh")) if self.exports else []
        return {"HOME": str(home), "PATH": _search_path(), **dict(exported), **self.environment}


def _search_path() -> str:
    return os.pathsep.join(filter(None, [os.environ.get("PENSTOCK_AGENTS"), os.environ.get("PATH")]))


def _block(heading: str, language: str) -> str:
    """Return the first block in a language below a heading of the page, for a scripted model."""
    _, _, section = PAGE.read_text(encoding="utf-8").partition(f"### {heading}\n")
    found = re.search(rf"```{language}\n(.*?)```", section, re.DOTALL)
    assert found, f"{PAGE.name} has no {language} below {heading!r}"
    text = found[1]
    for on_the_page, here in ON_THE_PAGE.items():
        text = text.replace(on_the_page, here)
    return text


AGENTS = {
    "claude_code": Program(
        "claude",
        ("-p", "--permission-mode", "bypassPermissions", "{task}"),
        exports="Claude Code",
        environment={"IS_SANDBOX": "1"},  # root may run it
    ),
    "codex_cli": Program(
        "codex",
        ("exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "{task}"),
        files={".codex/config.toml": ("Codex CLI", "toml")},
    ),
    "opencode": Program(
        "opencode",
        ("run", "{task}"),
        files={".config/opencode/opencode.json": ("opencode", "json")},
        environment={"OPENCODE_PERMISSION": '{"*": "allow"}', "OPENCODE_DISABLE_MODELS_FETCH": "1"},
    ),
    "continue": Program("cn", ("--auto", "-p", "{task}"), files={".continue/config.yaml": ("Continue", "yaml")}),
    "cline": Program("cline", ("-P", "openai-compatible", "-m", "model", "{task}"), prepares="Cline"),
}
"""Agent programs, by the names of their recorded requests."""
