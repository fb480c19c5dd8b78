"""Finds links in the HTML pages of the site that lead to a missing file or a missing anchor."""

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote

_LINK = re.compile(r"""<(?:a|link|img|script)\b[^>]*?\s(?:href|src)="([^"]*)\"""")
_ID = re.compile(r"""\sid="([^"]*)\"""")


def broken_links(site: Path) -> list[str]:
    """Return one line for each link below ``site`` whose file or anchor does not exist. Web addresses are not checked."""
    files = {path.relative_to(site).as_posix() for path in site.rglob("*") if path.is_file()}
    pages = {name: (site / name).read_text(encoding="utf-8") for name in sorted(files) if name.endswith(".html")}
    ids = {name: set(_ID.findall(text)) for name, text in pages.items()}
    return [
        f"{name}: {link}: {problem}"
        for name, text in pages.items()
        for link in sorted(set(_LINK.findall(text)))
        for problem in _problems(name, link, files, ids)
    ]


def _problems(page: str, link: str, files: set[str], ids: dict[str, set[str]]) -> Iterator[str]:
    if re.match(r"[a-z]+:", link):
        return
    path, _, anchor = unquote(link.replace("&amp;", "&")).partition("#")
    path = path.partition("?")[0]
    target = posixpath.normpath(posixpath.join(posixpath.dirname(page), path)) if path else page
    if target not in files:
        yield "there is no such file"
    elif anchor and target in ids and anchor not in ids[target]:
        yield f"{target} has no such anchor"
