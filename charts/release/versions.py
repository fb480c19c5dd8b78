"""The version of a release: its form, the files that contain it, and its section of the changelog."""

import re
from pathlib import Path

from charts.image_tag import chart_version

_FORM = re.compile(r"(0|[1-9]\d*)\.(0|[1-9]\d*)\.(0|[1-9]\d*)")
PLACES: dict[str, tuple[str, ...]] = {
    "services/*/pyproject.toml": (r'^version = "{}"$', r'"penstock-[a-z]+=={}"'),
    "protos/pyproject.toml": (r'^version = "{}"$',),
    "charts/penstock/Chart.yaml": (r"^version: {}$", r"^appVersion: {}$"),
    "examples/clients/go/go.mod": (r"penstock\.io/protos v{}$",),
    "examples/clients/java/pom.xml": (r"<penstock\.version>{}<",),
    "examples/clients/kotlin/pom.xml": (r"<penstock\.version>{}<",),
    "examples/clients/node/README.md": (r"penstock-protos-{}\.tgz",),
    "examples/clients/rust/Cargo.lock": (r'name = "penstock-protos"\nversion = "{}"$',),
    "docs/guides/clients/node.md": (r"penstock-protos-{}\.tgz",),
}
"""Patterns of files that contain the version, with the expressions around the version. The files belong to wheels, the chart,
images (by the chart's appVersion), packages of stubs, and examples that install these packages. Each file must match each of its
expressions, but a distribution need not depend on other distributions.
"""
_MAY_BE_ABSENT = r'"penstock-[a-z]+=={}"'
_ANY = r"\d+\.\d+\.\d+"


class ReleaseError(Exception):
    """Reason why a release is refused. The message has the cause and the remedy."""


def parsed(version: str) -> tuple[int, ...]:
    """Return the numbers of a version. Raises ReleaseError if it is not MAJOR.MINOR.PATCH.

    Pre-releases are refused, because wheels, Go modules and charts write pre-release versions differently.
    """
    if not (found := _FORM.fullmatch(version)):
        raise ReleaseError(f"VERSION is {version!r}; it must be MAJOR.MINOR.PATCH, for example 0.2.0")
    return tuple(map(int, found.groups()))


def current_version(root: Path) -> str:
    """Return the version in all files. Raises ReleaseError if a file is missing or has another version."""
    version = chart_version(root)
    for path, expression in _places(root):
        versions = set(re.findall(expression.format(f"({_ANY})"), path.read_text(encoding="utf-8"), re.MULTILINE))
        if not versions and expression == _MAY_BE_ABSENT:
            continue
        if versions != {version}:
            found = ", ".join(sorted(versions)) or "none"
            raise ReleaseError(
                f"{path.relative_to(root)} has version {found}; charts/penstock/Chart.yaml has {version}"
            )
    return version


def set_version(root: Path, version: str) -> None:
    """Write a version to all files."""
    for path, expression in _places(root):
        before, after = expression.split("{}")
        text = path.read_text(encoding="utf-8")
        text = re.sub(f"({before}){_ANY}({after})", rf"\g<1>{version}\g<2>", text, flags=re.MULTILINE)
        path.write_text(text, encoding="utf-8")


def _places(root: Path) -> list[tuple[Path, str]]:
    found = [
        (path, expression)
        for pattern, expressions in PLACES.items()
        for path in sorted(root.glob(pattern))
        for expression in expressions
    ]
    missing = [pattern for pattern in PLACES if not any(root.glob(pattern))]
    if missing:
        raise ReleaseError(f"no file matches {', '.join(missing)}")
    return found


def notes(root: Path, version: str) -> str:
    """Return the changelog's section of a version, without its heading. Raises ReleaseError if it is missing or has no entry."""
    changelog = (root / "CHANGELOG.md").read_text(encoding="utf-8")
    heading = re.search(rf"^## {re.escape(version)}(?: .*)?$", changelog, re.MULTILINE)
    if heading is None:
        raise ReleaseError(
            f"CHANGELOG.md has no section '## {version}'; rename the section of unreleased changes to it"
        )
    section = re.split(r"^## ", changelog[heading.end() :], maxsplit=1, flags=re.MULTILINE)[0].strip()
    if not re.search(r"^- ", section, re.MULTILINE):
        raise ReleaseError(f"section '## {version}' of CHANGELOG.md has no entry; list the changes")
    return section
