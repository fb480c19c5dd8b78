"""Publishes a release from its tagged commit: ``python -m charts.release.publish [--dry-run] files images chart``.

Needs Python, git, and a program for each kind of upload: gh for files, docker or a similar program for images, helm for
the chart.
"""

import argparse
import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from charts.release.versions import ReleaseError, current_version, notes

ROOT = Path(__file__).resolve().parents[2]
FILES = "build/publish"
"""Folder to which ``make release-files`` writes the wheels, the chart package, the contracts and their checksums."""
SERVICES = ("coordinator", "frontend", "enginecore")
_SHOWN = 100
"""Maximum number of characters of an argument that a dry run prints."""


@dataclass(frozen=True)
class Target:
    """Destination of a release.

    Attributes:
        registry: Registry of the images. The chart is in ``charts`` below the registry.
        builder: Program that builds and pushes images.
    """

    version: str
    registry: str
    builder: str
    device: str


Command = tuple[str, ...]


def files(root: Path, target: Target) -> list[Command]:
    """Return the commands that attach the files to a release on GitHub, with the notes of the changelog."""
    built = sorted(str(path.relative_to(root)) for path in (root / FILES).rglob("*") if path.is_file())
    if not any(target.version in name for name in built):
        raise ReleaseError(f"{FILES} has no files of {target.version}; run make release-files")
    title = f"Penstock {target.version}"
    about = ("--verify-tag", "--title", title, "--notes", notes(root, target.version))
    return [("gh", "release", "create", f"v{target.version}", *about, *built)]


def images(_: Path, target: Target) -> list[Command]:
    """Return the commands that build and push the images."""
    names = {service: f"{target.registry}/penstock/{service}:{target.version}" for service in SERVICES}
    names["enginecore"] += f"-{target.device}"
    variables = {
        "TAG": target.version,
        "REGISTRY": target.registry,
        "IMAGE_BUILDER": target.builder,
        "DEVICE": target.device,
    }
    build = ("make", "images", *(f"{name}={value}" for name, value in variables.items()))
    return [build, *((target.builder, "push", name) for name in names.values())]


def chart(_: Path, target: Target) -> list[Command]:
    """Return the commands that package and push the chart."""
    package = f"{FILES}/chart/penstock-{target.version}.tgz"
    return [
        ("helm", "package", "charts/penstock", "--destination", f"{FILES}/chart"),
        ("helm", "push", package, f"oci://{target.registry}/charts"),
    ]


KINDS: dict[str, Callable[[Path, Target], list[Command]]] = {"files": files, "images": images, "chart": chart}


def check_tag(root: Path, version: str) -> None:
    """Raise ReleaseError if the commit does not have the tag of the version."""
    command = ["git", "tag", "--points-at", "HEAD"]
    tags = subprocess.run(command, cwd=root, check=True, capture_output=True, text=True).stdout.split()  # noqa: S603 - our own words
    if f"v{version}" not in tags:
        raise ReleaseError(
            f"the current commit does not have the tag v{version}; check out the tag, or make a release first"
        )


def _shown(command: Command) -> str:
    words = (" ".join(word.split()) for word in command)
    return shlex.join(word if len(word) <= _SHOWN else f"{word[:_SHOWN]}..." for word in words)


def main() -> int:
    """Return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kinds", nargs="+", choices=KINDS, metavar="KIND", help=", ".join(KINDS))
    parser.add_argument("--dry-run", action="store_true", help="print the commands instead of running them")
    parser.add_argument("--registry", default="", help="registry and folder of the images and the chart")
    parser.add_argument("--builder", default="docker", help="program that builds and pushes images (default: docker)")
    parser.add_argument("--device", default="cuda", help="device in the tag of the engine's image (default: cuda)")
    args = parser.parse_args()
    try:
        version = current_version(ROOT)
        if not args.registry and {"images", "chart"} & {*args.kinds}:
            raise ReleaseError(
                "REGISTRY is empty; set it to the registry and folder of the images, for example registry.example/llm"
            )
        # Image names must be lower case.
        target = Target(version, args.registry.lower(), args.builder, args.device)
        commands = [command for kind in args.kinds for command in KINDS[kind](ROOT, target)]
        if not args.dry_run:
            check_tag(ROOT, version)
    except ReleaseError as e:
        print(f"publish refused: {e}", file=sys.stderr)
        return 1
    for command in commands:
        print(f"{'would run' if args.dry_run else 'running'}: {_shown(command)}", flush=True)
        if not args.dry_run and (code := subprocess.run(command, cwd=ROOT, check=False).returncode):  # noqa: S603 - our own words
            return code
    return 0


if __name__ == "__main__":
    sys.exit(main())
