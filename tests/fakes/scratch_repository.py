"""Separate git repository with the current files of this repository, for tests that commit and tag."""

import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def git(folder: Path, *arguments: str) -> str:
    """Run git with a fixed author, and return its output."""
    who = ("-c", "user.name=a", "-c", "user.email=a@example.com")
    done = subprocess.run(["git", *who, *arguments], cwd=folder, check=True, capture_output=True, text=True)
    return done.stdout.strip()


def scratch_repository(folder: Path) -> Path:
    """Create a repository in ``folder`` with all tracked and untracked files in one commit."""
    for name in git(ROOT, "ls-files", "-co", "--exclude-standard").splitlines():
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name, follow_symlinks=False)
    git(folder, "init", "-q")
    git(folder, "config", "user.name", "a")
    git(folder, "config", "user.email", "a@example.com")
    commit(folder)
    return folder


def commit(folder: Path) -> None:
    """Commit all changes."""
    git(folder, "add", "-A")
    git(folder, "commit", "-qm", "state")
