"""Builds the docs site: ``python -m docs.site [--out FOLDER]``. A warning or a broken link ends it with exit code 1."""

import argparse
import importlib.metadata
import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

from sphinx.cmd.build import build_main

from docs.site.check_links import broken_links
from docs.site.pages import DOCS, ROOT, stage
from docs.site.proto_reference import proto_pages
from docs.site.python_reference import python_pages


def build(docs: Path, out: Path, generated: Mapping[str, str]) -> int:
    """Build the site of the pages in ``docs`` and the ``generated`` pages into ``out``. Return the exit code."""
    work = out.with_name(f"{out.name}-work")
    if (out / ".buildinfo").exists():  # a site, which may have pages that are gone now
        shutil.rmtree(out)
    stage(docs, work / "pages", generated)
    settings = {"version": importlib.metadata.version("penstock"), "docs_folder": str(docs)}
    # Cached pages would not repeat their warnings, so each build reads all pages.
    flags = ["-q", "-W", "-E", "-a", "-j", str(min(2, os.cpu_count() or 1)), "-c", str(Path(__file__).parent)]
    flags += [word for name, value in settings.items() for word in ("-D", f"{name}={value}")]
    if code := build_main([*flags, "-d", str(work / "doctrees"), str(work / "pages"), str(out)]):
        return int(code)
    broken = broken_links(out)
    for line in broken:
        print(line, file=sys.stderr)
    return 1 if broken else 0


def main() -> int:
    """Return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "build/docs", help="folder of the site")
    out = parser.parse_args().out.resolve()
    if code := build(DOCS, out, {**proto_pages(), **python_pages()}):
        return code
    print(f"docs: {out / 'index.html'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
