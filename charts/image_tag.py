"""Image tag that is unique to the state of the repository. ``python3 charts/image_tag.py`` prints the tag.

The tag is ``VERSION-COMMIT``. If files differ from the commit or are untracked, it is ``VERSION-COMMIT-dirty-HASH``
with a hash of the contents of all files. Without git, as in a source archive, the tag is only the version. The module
needs only Python and git.
"""

import hashlib
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_DIGITS = 12


def image_tag(root: Path) -> str:
    """Return the tag of the current files in ``root``."""
    version = chart_version(root)
    if not (root / ".git").exists():
        return version
    commit = _git(root, "rev-parse", f"--short={_DIGITS}", "HEAD").decode().strip()
    if not _git(root, "status", "--porcelain"):
        return f"{version}-{commit}"
    return f"{version}-{commit}-dirty-{_contents(root)}"


def chart_version(root: Path) -> str:
    """Return the chart's appVersion, which is the version of all packages. Raises ValueError if it is missing."""
    chart = (root / "charts" / "penstock" / "Chart.yaml").read_text(encoding="utf-8")
    found = re.search(r"^appVersion: \"?([^\"\s]+)", chart, flags=re.MULTILINE)
    if found is None:
        raise ValueError(f"{root}/charts/penstock/Chart.yaml has no appVersion")
    return found[1]


def _contents(root: Path) -> str:
    digest = hashlib.sha256()
    for name in sorted(filter(None, _git(root, "ls-files", "-coz", "--exclude-standard").split(b"\0"))):
        path = root / name.decode(errors="surrogateescape")
        if path.is_symlink():
            content = bytes(path.readlink())
        elif path.is_file():
            content = path.read_bytes()
        else:  # a removed file, or a nested repository
            continue
        executable = path.stat(follow_symlinks=False).st_mode & 0o111
        digest.update(b"%d %s %d %d\0" % (len(name), name, executable, len(content)))
        digest.update(content)
    return digest.hexdigest()[:_DIGITS]


def _git(root: Path, *arguments: str) -> bytes:
    command = ["git", "-C", str(root), *arguments]
    return subprocess.run(command, capture_output=True, check=True).stdout  # noqa: S603 - our own words


if __name__ == "__main__":
    sys.stdout.write(image_tag(ROOT) + "\n")
