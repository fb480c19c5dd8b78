"""Sphinx extension: links from a page to files outside ``docs`` lead to the repository.

With DOCS_SOURCE_URL, such a link leads to the file below that address. Without it, the page shows the path of the file. A link
to a file that does not exist is a warning, which ends the build.
"""

from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.transforms import SphinxTransform
from sphinx.util import logging

from docs.site.pages import DOCS

_log = logging.getLogger(__name__)


class RepositoryLinks(SphinxTransform):
    """Replaces links to files of the repository that are not pages of the site."""

    default_priority = 5

    def apply(self, **_: Any) -> None:
        """Replace the links of one page."""
        docs = Path(self.config.docs_folder)
        page = docs / f"{self.env.docname}.md"
        for node in list(self.document.findall(addnodes.pending_xref)):
            if node["reftype"] != "myst" or node.get("refdomain") == "doc":  # a page of the site
                continue
            path, _hash, anchor = unquote(node["reftarget"]).partition("#")
            target: Path = (page.parent / path).resolve()
            if not path or "://" in path or (target.is_relative_to(docs) and target.suffix == ".md"):
                continue
            if target.is_dir() and (target / "README.md").exists() and target.is_relative_to(docs):
                node.attributes.update(
                    refdomain="doc", reftarget=f"{target.relative_to(docs)}/README", reftargetid=None
                )
                continue
            if not target.exists() or not target.is_relative_to(docs.parent):
                _log.warning("link to %r: there is no such file", path, location=node, type="penstock", subtype="link")
                continue
            node.replace_self(self._link(node, target.relative_to(docs.parent), anchor))

    def _link(self, node: nodes.Element, path: Path, anchor: str) -> list[nodes.Node]:
        url = str(self.config.docs_source_url).rstrip("/")
        if url:
            fragment = f"#{anchor}" if anchor else ""
            link = nodes.reference("", "", *node.children, refuri=f"{url}/{quote(str(path))}{fragment}", internal=False)
            return [link]
        literal = nodes.literal("", str(path))
        if str(path).endswith(node.astext().strip("./")):  # the text is the path, or its end
            return [literal]
        return [*node.children, nodes.Text(", "), literal]


def setup(app: Sphinx) -> dict[str, Any]:
    """Add the settings and the transform to Sphinx."""
    app.add_config_value("docs_folder", str(DOCS), "env", types=frozenset([str]))
    app.add_config_value("docs_source_url", "", "env", types=frozenset([str]))
    app.add_transform(RepositoryLinks)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
