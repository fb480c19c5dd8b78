"""Sphinx configuration of the docs site; ``python -m docs.site`` passes the folder of pages and the version."""

import os
import re
from collections.abc import Iterator
from typing import Any

from pygments.lexers import KotlinLexer
from pygments.token import Error, Text
from sphinx.application import Sphinx

project = "Penstock"
author = "The Penstock authors"
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "docs.site.repository_links",
]
root_doc = "index"
source_suffix = {".md": "markdown", ".rst": "restructuredtext"}

# Anchors are those that Git web pages give to headings.
myst_heading_anchors = 6
myst_links_external_new_tab = False

autodoc_typehints_format = "short"
autodoc_member_order = "bysource"
toc_object_entries_show_parents = "hide"
autoclass_content = "both"
autodoc_preserve_defaults = True
napoleon_numpy_docstring = False

# Address of the folder of files in a web view of the repository, for links to files that are not pages.
docs_source_url = os.environ.get("DOCS_SOURCE_URL", "")

html_theme = "furo"
html_title = "Penstock"
html_static_path = ["static"]
html_css_files = ["penstock.css"]
html_copy_source = False
html_show_sourcelink = False
html_show_sphinx = False
html_show_copyright = False
html_theme_options = {"navigation_with_keys": True}
pygments_style = "a11y-high-contrast-light"
pygments_dark_style = "a11y-high-contrast-dark"


class Kotlin(KotlinLexer):  # type: ignore[misc]
    """Reads ``fun <T : Bound> T.name()``, which Pygments does not know."""

    def get_tokens_unprocessed(self, *arguments: Any, **options: Any) -> Iterator[tuple[int, Any, str]]:
        """Yield the tokens, unknown characters as text."""
        for index, token, value in super().get_tokens_unprocessed(*arguments, **options):
            yield index, Text if token is Error else token, value


def short_names(*event: Any) -> tuple[str, str] | None:
    """Shorten types like ``~package.Type`` in the signature that autodoc has made for a struct."""
    *_, signature, returned = event
    return (re.sub(r"~[\w.]+\.(\w+)", r"\1", signature), returned) if signature else None


def setup(app: Sphinx) -> None:
    """Add the lexer and the shortening to Sphinx."""
    app.add_lexer("kotlin", Kotlin)
    app.connect("autodoc-process-signature", short_names)
