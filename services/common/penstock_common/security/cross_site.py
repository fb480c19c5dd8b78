"""Detection of HTTP calls that a browser makes for a web page of another site.

A browser lets every page send requests to every server, including servers on the user's own machine. The page cannot
read the response, but the server processes the request. With DNS rebinding, the owner of a site lets the site's name
resolve to that server. The page and the server then have the same origin, so the page can also read the responses.
Browsers set headers that identify such calls, and pages cannot change these headers.
"""

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from penstock_common.addresses import is_loopback, resolve
from penstock_common.config.allowed_hosts import AllowedHosts, AllowedOrigins, canonical_host

_HEADERS = frozenset(
    (
        b"host",
        b"origin",
        b"sec-fetch-site",
        b"sec-fetch-mode",
        b"sec-fetch-dest",
        b"content-type",
        b"content-length",
        b"transfer-encoding",
    )
)
"""Names of the headers that the checks read."""
_AUTHORITY = re.compile(r"(?P<host>\[[0-9A-Fa-f:.]+\]|[^\[\]:/?#@\s]+)(:(?P<port>[0-9]{0,5}))?")
_DEFAULT_PORTS = {"http": 80, "https": 443}
_READING = ("GET", "HEAD")
_JSON_OR_FORM = re.compile(r"application/json|[^/\s]+/[^/\s]+\+json|multipart/form-data", re.IGNORECASE)
_SHOWN = 200
"""Maximum number of characters of a header value in an error message."""
_NO_PAGES = "pages of other origins may not call this port"


class CallerRules(NamedTuple):
    """Rules for calls from browsers to a listener.

    Args:
        section: Settings section of the listener, for messages.
        hosts: Host names by which clients may call the listener, or None if all are allowed.
        origins: Allowed origins in addition to the listener's own origin. None if the listener has no setting for
            origins.
    """

    section: str
    hosts: AllowedHosts | None
    origins: AllowedOrigins | None


class Refusal(NamedTuple):
    """Refusal of a call: HTTP status, message, and a code for programs."""

    status: int
    message: str
    code: str


def caller_rules(
    section: str, host: str, allowed_hosts: Sequence[str], allowed_origins: Sequence[str] | None = None
) -> CallerRules:
    """Return the rules of a listener on ``host``.

    The rules check host names if ``host`` is a loopback address or ``allowed_hosts`` is not empty.
    """
    checks_hosts = bool(allowed_hosts) or _binds_loopback(host)
    hosts = AllowedHosts(allowed_hosts, field=f"{section}.allowed_hosts", bound=host) if checks_hosts else None
    origins = None if allowed_origins is None else AllowedOrigins(allowed_origins)
    return CallerRules(section, None if hosts is None or hosts.any else hosts, origins)


def refusal(method: str, headers: Iterable[tuple[bytes, bytes]], rules: CallerRules) -> Refusal | None:
    """Return the refusal of a call, or None if the call is allowed. ``headers`` are ASGI headers with names in lower
    case.

    The status is 421 or 400 for a wrong ``Host``, 403 for a page of another origin, and 415 if a page's body is declared
    neither as JSON nor as a form with files. Before a browser sends JSON to another origin, the browser asks the server
    (CORS preflight). A browser sends forms and plain text without asking, so only the check of the origin protects forms.
    """
    given: dict[bytes, list[str]] = {}
    for name, value in headers:
        if name in _HEADERS:
            given.setdefault(name, []).append(value.decode("latin-1"))
    # Browsers always send Host, so a call without Host (HTTP/1.0) does not come from a page.
    hosts = given.get(b"host", [])
    if len(hosts) > 1:
        return Refusal(400, f"the call has {len(hosts)} Host headers; send one", "host_repeated")
    host = hosts[0] if hosts else None
    if rules.hosts is not None and host is not None and _host_of(host) not in rules.hosts:
        return Refusal(
            421,
            f"Host is {host[:_SHOWN]!r}, which is not in {rules.section}.allowed_hosts; add the name there if clients reach this "
            "server by this name",
            "host_not_allowed",
        )
    return _foreign(method, given, host, rules) or _wrong_type(method, given)


def _foreign(method: str, given: dict[bytes, list[str]], host: str | None, rules: CallerRules) -> Refusal | None:
    """Return a refusal if the call comes from a page of another origin that is not allowed."""
    site, allowed = _last(given, b"sec-fetch-site"), rules.origins
    if site == "same-origin" or (allowed is not None and allowed.any):
        # The browser has already compared the page's origin with the called URL. Comparing the origin with Host again
        # could refuse the call wrongly, because a proxy may have changed Host.
        return None
    origins = given.get(b"origin", [])
    if not origins:
        if site in ("", "none") or _is_navigation(method, given):
            return None
        what = f"the call is from a page of another origin (Sec-Fetch-Site is {site[:_SHOWN]!r}, and Origin is missing)"
        listed = (
            f"{rules.section}.allowed_origins lists pages that may call, by fetch" if allowed is not None else _NO_PAGES
        )
        return Refusal(403, f"{what}; {listed}", "origin_not_allowed")
    origin = ", ".join(origins)
    if (allowed is not None and origin in allowed) or (host is not None and _is_own(origin, host)):
        return None
    own = f"this server's own ({(host or 'no Host')[:_SHOWN]})"
    if allowed is None:
        return Refusal(403, f"Origin is {origin[:_SHOWN]!r}, which is not {own}; {_NO_PAGES}", "origin_not_allowed")
    return Refusal(
        403,
        f"Origin is {origin[:_SHOWN]!r}, which is neither {own} nor in {rules.section}.allowed_origins; add it there to let its "
        "pages call this server",
        "origin_not_allowed",
    )


def _wrong_type(method: str, given: dict[bytes, list[str]]) -> Refusal | None:
    """Return a refusal if a page's body has a type that no client of the API sends."""
    if b"origin" not in given or method in _READING:
        return None
    if b"transfer-encoding" not in given and _last(given, b"content-length") in ("", "0"):
        return None
    types = given.get(b"content-type", [""])
    if all(_JSON_OR_FORM.fullmatch(each.partition(";")[0].strip()) for each in types):
        return None
    return Refusal(
        415,
        f"Content-Type is {', '.join(types)[:_SHOWN]!r}; in a call with an Origin header, it must be application/json or "
        "multipart/form-data",
        "json_required",
    )


def _is_navigation(method: str, given: dict[bytes, list[str]]) -> bool:
    """Return whether the user has followed a link to this server. The page with the link cannot read the response."""
    shows_page = _last(given, b"sec-fetch-mode") == "navigate" and _last(given, b"sec-fetch-dest") == "document"
    return shows_page and method in _READING


def _is_own(origin: str, host: str) -> bool:
    """Return whether an origin has the same host and port as a ``Host`` header.

    A proxy may have terminated TLS, so the scheme is used only to find the origin's default port. A ``Host`` without a
    port may mean the default port of either scheme.
    """
    scheme, _, authority = origin.partition("://")
    theirs, ours = _AUTHORITY.fullmatch(authority), _AUTHORITY.fullmatch(host)
    if scheme not in _DEFAULT_PORTS or theirs is None or ours is None:
        return False
    if canonical_host(theirs["host"]) != canonical_host(ours["host"]):
        return False
    port = int(theirs["port"] or _DEFAULT_PORTS[scheme])
    return port in ((int(ours["port"]),) if ours["port"] else _DEFAULT_PORTS.values())


def _host_of(header: str) -> str:
    """Return the host of a ``Host`` header in canonical form, or an empty string if the header is malformed."""
    match = _AUTHORITY.fullmatch(header)
    return canonical_host(match["host"]) if match is not None else ""


def _last(given: dict[bytes, list[str]], name: bytes) -> str:
    return given[name][-1].strip() if name in given else ""


def _binds_loopback(host: str) -> bool:
    if is_loopback(host):
        return True
    try:
        _, address = resolve(host, 0)
    except OSError:
        return False  # the listener itself reports this error
    return is_loopback(address[0])
