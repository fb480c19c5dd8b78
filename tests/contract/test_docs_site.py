"""The docs site: links, navigation, generated reference, and faults of pages that stop the build.

`make docs` builds the site.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from docs.site.check_links import broken_links
from docs.site.pages import DOCS, HOME, KINDS, stage
from docs.site.proto_reference import descriptors, proto_pages
from docs.site.python_reference import python_pages

ROOT = Path(__file__).resolve().parents[2]
BUILD = """
import sys
from pathlib import Path
from docs.site.__main__ import build
sys.exit(build(Path(sys.argv[1]), Path(sys.argv[2]), {}))
"""
HOME_PAGE = """\
# Home

## Guides

- [Second](guides/second.md)

## Reference

- [Words](reference/words.md#a-word)
"""


def written(folder: Path, pages: dict[str, str]) -> Path:
    """Write a repository with these pages in ``docs``, and return the ``docs`` folder."""
    docs = folder / "docs"
    (folder / "charts").mkdir(parents=True)
    (folder / "charts" / "values.yaml").write_text("a: 1\n")
    for name, text in {HOME: HOME_PAGE, "reference/words.md": "# Words\n\n## A word\n", **pages}.items():
        (docs / name).parent.mkdir(parents=True, exist_ok=True)
        (docs / name).write_text(text)
    return docs


def built(docs: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", BUILD, str(docs), str(docs.parent / "site")]
    return subprocess.run(
        command, cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True, timeout=300
    )


PAGES = {
    "guides/first.md": "# First\n\n[values](../../charts/values.yaml), [decisions](../adr), `x`.\n",
    "guides/second.md": "# Second\n\n[a word](../reference/words.md#a-word), [values.yaml](../../charts/values.yaml)\n",
    "adr/README.md": "# Decisions\n",
    "adr/0001-a.md": "# 1. The first\n",
    "reports/2026-01-02-speed.md": "# Speed\n",
    "reports/2026-01-03-size.md": "# Size\n",
}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    docs = written(tmp_path_factory.mktemp("repository"), PAGES)
    done = built(docs, DOCS_SOURCE_URL="https://git.example.com/tree/v1/")
    assert (done.returncode, done.stderr) == (0, "")
    return docs.parent / "site"


def test_links_out_of_docs_lead_to_the_address_of_the_sources(site: Path) -> None:
    page = (site / "guides/first.html").read_text()
    assert re.search(r'href="https://git\.example\.com/tree/v1/charts/values\.yaml">(<[^>]*>)*values', page)
    assert re.search(r'href="\.\./adr/README\.html"[^>]*>(<[^>]*>)*decisions', page)


def test_without_an_address_links_out_of_docs_are_paths(tmp_path: Path) -> None:
    docs = written(tmp_path, PAGES)
    assert built(docs, DOCS_SOURCE_URL="").returncode == 0
    path = '<code class="docutils literal notranslate"><span class="pre">charts/values.yaml</span></code>'
    assert f"values</span>, {path}" in (tmp_path / "site/guides/first.html").read_text()
    second = (tmp_path / "site/guides/second.html").read_text()
    assert path in second
    assert "</span>, <code" not in second


def test_pages_of_the_home_page_come_first_and_no_page_is_left_out(site: Path) -> None:
    home = (site / "index.html").read_text()
    sidebar = re.findall(r'<a class="reference internal" href="([^"]+)">', home[home.index("sidebar-tree") :])
    assert [page for page in sidebar if page.startswith("guides")][:2] == ["guides/second.html", "guides/first.html"]
    assert {"reference/words.html", "adr/README.html", "reports/README.html"} <= set(sidebar)


def test_decisions_and_reports_have_an_index(site: Path) -> None:
    assert 'href="0001-a.html"' in (site / "adr/README.html").read_text()
    reports = (site / "reports/README.html").read_text()
    assert reports.index("2026-01-03: Size") < reports.index("2026-01-02: Speed")


def test_search_finds_words_of_pages(site: Path) -> None:
    assert "speed" in (site / "searchindex.js").read_text()
    assert (site / "search.html").exists()


def test_defects_of_pages_end_the_build(tmp_path: Path) -> None:
    defects = {
        "guides/second.md": "# Second\n\n[x](../../charts/gone.yaml)\n",
        "guides/page.md": "# Page\n\n[x](gone.md)\n",
        "guides/anchor.md": "# Anchor\n\n[x](../reference/words.md#another-word)\n",
        "guides/picture.md": "# Picture\n\n![x](../images/gone.png)\n",
        "guides/language.md": "# Language\n\n```no-such-language\nx\n```\n",
    }
    done = built(written(tmp_path, defects))
    assert done.returncode == 1
    for name in defects:
        assert f"{name}:3: WARNING" in done.stderr


def test_a_page_that_is_gone_is_not_on_the_next_site(tmp_path: Path) -> None:
    docs = written(tmp_path, PAGES)
    gone = tmp_path / "site/guides/gone.html"
    gone.parent.mkdir(parents=True)
    gone.write_text('<a href="nowhere.html">1</a>')
    (tmp_path / "site/.buildinfo").touch()
    assert built(docs).returncode == 0
    assert not gone.exists()


def test_a_link_of_a_built_page_to_nothing_is_found(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text(
        '<a href="b.html#x">1</a><a class="c" href="gone.html">2</a><img alt="" src="c.png">'
    )
    (tmp_path / "b.html").write_text('<p id="y"></p><a href="https://example.com/">3</a><a href="#y">4</a>')
    assert broken_links(tmp_path) == [
        "a.html: b.html#x: b.html has no such anchor",
        "a.html: c.png: there is no such file",
        "a.html: gone.html: there is no such file",
    ]


def test_every_part_of_the_contracts_is_in_the_reference_with_its_comment() -> None:
    pages = proto_pages()
    for file in descriptors().file:
        page = pages[f"reference/api/contracts/{file.package}.md"]
        comments = {tuple(place.path): place.leading_comments for place in file.source_code_info.location}
        for index, service in enumerate(file.service):
            for number, method in enumerate(service.method):
                assert re.search(rf"^### {method.name}$", page, re.MULTILINE)
                assert plain(comments[6, index, 2, number]) in plain(page)
        for index, message in enumerate(file.message_type):
            section = page[page.index(f"(proto-{file.package}-{message.name}".replace(".", "-").lower() + ")=") :]
            for number, field in enumerate(message.field):
                _, found, text = section.partition(f"\n`{field.name}` = {field.number}: ")
                assert found, f"{message.name}.{field.name}"
                assert plain(comments[4, index, 2, number]) in plain(text)
        for index, enum in enumerate(file.enum_type):
            for number, value in enumerate(enum.value):
                _, found, text = page.partition(f"\n`{value.name}` = {value.number}\n")
                assert found, f"{enum.name}.{value.name}"
                assert plain(comments[5, index, 2, number]) in plain(text)


def plain(text: str) -> str:
    """Return the letters and digits of a text."""
    lines = [line for line in text.splitlines() if "buf:lint:" not in line]
    return re.sub(r"[^a-z0-9]", "", "".join(lines).lower())


def test_all_that_the_python_packages_export_is_in_the_reference() -> None:
    import penstock_client
    import penstock_local

    client, llm = python_pages().values()
    assert [
        name for name in penstock_client.__all__ if not re.search(rf"penstock_client\.{name}\n|`{name} <", client)
    ] == []
    assert [name for name in penstock_local.__all__ if f"penstock_local.{name}\n" not in llm] == []
    assert "``max_num_seqs``: default" in llm


def test_the_home_page_has_a_section_for_each_kind_of_pages(tmp_path: Path) -> None:
    headings = re.findall(r"^## (.+)$", (DOCS / HOME).read_text(), re.MULTILINE)
    assert [heading.lower() for heading in headings] == list(KINDS)
    stage(DOCS, tmp_path / "pages", {})
    assert {path.name for path in DOCS.iterdir() if path.is_dir()} >= {*KINDS}
