"""The web pages that may call a listener from a browser, as ``http.allowed_origins`` lists them."""

import re
from collections.abc import Sequence

from penstock_common.errors import ConfigError

ANY_ORIGIN = "*"
_ENTRY = re.compile(r"\*|null|[a-z][a-z0-9+.-]*://(\*|[^/*\s]*)")


class AllowedOrigins:
    """Tells whether an ``Origin`` is one of ``entries``.

    An entry is an origin as browsers send it, ``SCHEME://*`` (every origin of that scheme), ``null`` or ``*`` (any origin).
    """

    def __init__(self, entries: Sequence[str]) -> None:
        """Raises ConfigError, naming ``http.allowed_origins``, for an entry of another form."""
        for entry in entries:
            if _ENTRY.fullmatch(entry) is None or entry != entry.lower():
                raise ConfigError(
                    f"http.allowed_origins: {entry!r} must be an origin in lower case without a path, as https://example.org, "
                    "or SCHEME://*, null or *"
                )
        self.any = ANY_ORIGIN in entries
        self._schemes = tuple(entry.removesuffix("*") for entry in entries if entry.endswith("://*"))
        self.exact = tuple(entry for entry in entries if not entry.endswith("://*"))
        """The entries that are not of the form ``SCHEME://*``."""

    @property
    def pattern(self) -> str | None:
        """A regular expression for the origins of the entries ``SCHEME://*``, or None if there are none."""
        return rf"({'|'.join(map(re.escape, self._schemes))}).*" if self._schemes else None

    def __contains__(self, origin: str) -> bool:
        return self.any or origin in self.exact or origin.startswith(self._schemes)
