"""Makes a release: ``python -m charts.release VERSION``. Runs checks, sets the version in all files, builds, commits
and tags.

If a release is refused or fails, the repository is unchanged.
"""

import argparse
import datetime as dt
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

from charts.release import artifacts
from charts.release.versions import ReleaseError, current_version, notes, parsed, set_version

ROOT = Path(__file__).resolve().parents[2]
PAGE = "docs/releases.md"
RELEASED = "protos/released"


def main() -> int:
    """Return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("version", help="MAJOR.MINOR.PATCH, greater than the version of the repository")
    parser.add_argument("--gates", default="make test", help="shell command that must succeed (default: make test)")
    args = parser.parse_args()
    try:
        check(ROOT, args.version)
        run_gates(ROOT, args.gates)
        out = release(ROOT, args.version)
    except ReleaseError as e:
        print(f"release refused: {e}", file=sys.stderr)
        return 1
    print(f"released {args.version}: tag v{args.version}, files in {out.relative_to(ROOT)}")
    return 0


def check(root: Path, version: str) -> None:
    """Raise ReleaseError if the version, the working tree or the changelog is not ready for the release."""
    numbers = parsed(version)
    if f"v{version}" in git(root, "tag", "--list").splitlines():
        raise ReleaseError(f"tag v{version} already exists; choose a greater version")
    last = current_version(root)
    if numbers <= parsed(last):
        raise ReleaseError(f"VERSION is {version}; it must be greater than the last version, {last}")
    if (root / RELEASED / f"v{version}.binpb").exists():
        raise ReleaseError(f"{RELEASED}/v{version}.binpb already exists; choose a greater version")
    check_clean(root)
    notes(root, version)


def check_clean(root: Path) -> None:
    """Raise ReleaseError if a file differs from the commit or is untracked."""
    if changed := git(root, "status", "--porcelain").splitlines():
        raise ReleaseError(
            f"the working tree has uncommitted changes; commit or remove them first: {', '.join(changed[:5])}"
        )


def run_gates(root: Path, gates: str) -> None:
    """Run the gates. Raises ReleaseError if they fail or change files."""
    # Remove make's variables, because the VERSION of this make run must not reach the gates.
    env = {name: value for name, value in os.environ.items() if name not in {"MAKEFLAGS", "MFLAGS", "MAKELEVEL"}}
    print(f"release: running {gates}", flush=True)
    code = subprocess.run(gates, shell=True, cwd=root, env=env, check=False).returncode  # noqa: S602 - the caller's command
    if code:
        raise ReleaseError(f"the gates failed: {gates!r} ended with exit code {code}")
    check_clean(root)


def release(root: Path, version: str) -> Path:
    """Set the version, build, commit and tag.

    Returns the folder with the files. Restores the repository after a failure.
    """
    before = git(root, "rev-parse", "HEAD")
    out = root / "build/release" / version
    try:
        set_version(root, version)
        contracts = root / RELEASED / f"v{version}.binpb"
        artifacts.write_contracts(root / "protos", contracts)
        words = [sys.executable, "-m", "tests.contract.words", version]
        subprocess.run(words, cwd=root, check=True, stdout=subprocess.DEVNULL)  # noqa: S603 - our own words
        record(root, version, before, hashlib.sha256(contracts.read_bytes()).hexdigest())
        artifacts.build(root, version, out)
        git(root, "add", "--all")
        git(root, "commit", "--quiet", "--message", f"release: publish {version}")
        git(root, "tag", "--annotate", f"v{version}", "--message", f"Penstock {version}")
    except BaseException as e:
        restore(root, version, before)
        shutil.rmtree(out, ignore_errors=True)
        if isinstance(e, subprocess.CalledProcessError):
            raise ReleaseError(f"{' '.join(map(str, e.cmd[:4]))} failed: {str(e.stderr or '').strip()}") from e
        raise
    return out


def restore(root: Path, version: str, commit: str) -> None:
    """Reset the repository to a commit.

    The tree was clean before the release, so only changes of the release are lost.
    """
    git(root, "reset", "--quiet", "--hard", commit)
    for path in (root / RELEASED).glob(f"v{version}.*"):
        path.unlink()
    if f"v{version}" in git(root, "tag", "--list").splitlines():
        git(root, "tag", "--delete", f"v{version}")


def record(root: Path, version: str, commit: str, digest: str) -> None:
    """Add a row at the top of the table of releases."""
    page = root / PAGE
    text = page.read_text(encoding="utf-8")
    rule = "|---|---|---|---|\n"
    if text.count(rule) != 1:
        raise ReleaseError(f"{PAGE} must have one table of releases, with four columns")
    today = dt.datetime.now(dt.UTC).date().isoformat()
    row = f"| {version} | {today} | `{commit[:12]}` | `{digest}` |\n"
    page.write_text(text.replace(rule, rule + row), encoding="utf-8")


def git(root: Path, *arguments: str) -> str:
    """Return the output of git. Raises CalledProcessError."""
    done = subprocess.run(["git", *arguments], cwd=root, check=True, capture_output=True, text=True)  # noqa: S603, S607 - our own words
    return done.stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
