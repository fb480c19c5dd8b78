"""Decides which HTTP calls to refuse because a browser made them for a page that has no business here.

A browser lets every page send requests to every server, a server on the user's own machine included. The answer stays hidden
from the page, but the work is done. And where the owner of a site makes its name point to that server ("DNS rebinding"), the page
and the server have the same origin, and the page reads the answers, too. The headers that browsers set tell such calls apart: a
page cannot change them.
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
"""The headers that decide."""
_AUTHORITY = re.compile(r"(?P<host>\[[0-9A-Fa-f:.]+\]|[^\[\]:/?#@\s]+)(:(?P<port>[0-9]{0,5}))?")
_DEFAULT_PORTS = {"http": 80, "https": 443}
_READING = ("GET", "HEAD")
_JSON = re.compile(r"application/json|[^/\s]+/[^/\s]+\+json", re.IGNORECASE)
_SHOWN = 200
"""Characters of a header that a message quotes."""
_NO_PAGES = "pages of other origins may not call this port"


class CallerRules(NamedTuple):
    """What a listener lets browsers do.

    Args:
        section: The section of the listener's settings, for messages.
        hosts: The names under which the listener may be called; None: any.
        origins: Pages that may call; None: none but the listener's own, and no setting lists others.
    """

    section: str
    hosts: AllowedHosts | None
    origins: AllowedOrigins | None


class Refusal(NamedTuple):
    """Why a call is not served: the status of the answer, its message and a code for programs."""

    status: int
    message: str
    code: str


def caller_rules(
    section: str, host: str, allowed_hosts: Sequence[str], allowed_origins: Sequence[str] | None = None
) -> CallerRules:
    """Return the rules of a listener on ``host``. On loopback, or where there are ``allowed_hosts``, hosts are checked."""
    checks_hosts = bool(allowed_hosts) or _binds_loopback(host)
    hosts = AllowedHosts(allowed_hosts, field=f"{section}.allowed_hosts", bound=host) if checks_hosts else None
    origins = None if allowed_origins is None else AllowedOrigins(allowed_origins)
    return CallerRules(section, None if hosts is None or hosts.any else hosts, origins)


def refusal(method: str, headers: Iterable[tuple[bytes, bytes]], rules: CallerRules) -> Refusal | None:
    """Return why a call must not be served, or None. ``headers``: the call's, as ASGI has them, with names in lower case.

    The status is 421 (or 400) for a wrong ``Host``, 403 for a page of another origin, 415 for a body from a page that is not
    declared as JSON: a browser asks before it sends JSON to another origin, and does not ask before it sends plain text.
    """
    given: dict[bytes, list[str]] = {}
    for name, value in headers:
        if name in _HEADERS:
            given.setdefault(name, []).append(value.decode("latin-1"))
    # No browser leaves Host out, so a call without it (HTTP/1.0) is no page's.
    hosts = given.get(b"host", [])
    if len(hosts) > 1:
        return Refusal(400, f"the call has {len(hosts)} Host headers; send one", "host_repeated")
    host = hosts[0] if hosts else None
    if rules.hosts is not None and host is not None and _host_of(host) not in rules.hosts:
        return Refusal(
            421,
            f"Host is {host[:_SHOWN]!r}, which is not in {rules.section}.allowed_hosts; add the name there if clients reach this "
            "server by it",
            "host_not_allowed",
        )
    return _foreign(method, given, host, rules) or _not_json(method, given)


def _foreign(method: str, given: dict[bytes, list[str]], host: str | None, rules: CallerRules) -> Refusal | None:
    """A refusal if the call is from a page of another origin that is not allowed."""
    site, allowed = _last(given, b"sec-fetch-site"), rules.origins
    if site == "same-origin" or (allowed is not None and allowed.any):
        # The browser compared the page's origin with the URL that it calls. A proxy may have changed Host on the way here.
        return None
    origins = given.get(b"origin", [])
    if not origins:
        if site in ("", "none") or _is_navigation(method, given):
            return None
        what = (
            f"the call is from a page of another origin (Sec-Fetch-Site is {site[:_SHOWN]!r}, and there is no Origin)"
        )
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


def _not_json(method: str, given: dict[bytes, list[str]]) -> Refusal | None:
    """A refusal if the call is from a page and its body may have been sent without asking."""
    if b"origin" not in given or method in _READING:
        return None
    if b"transfer-encoding" not in given and _last(given, b"content-length") in ("", "0"):
        return None
    types = given.get(b"content-type", [""])
    if all(_JSON.fullmatch(each.partition(";")[0].strip()) for each in types):
        return None
    return Refusal(
        415,
        f"Content-Type is {', '.join(types)[:_SHOWN]!r}; a call with an Origin must say application/json",
        "json_required",
    )


def _is_navigation(method: str, given: dict[bytes, list[str]]) -> bool:
    """Whether the user follows a link to a page of this server, which the page with the link cannot read."""
    shows_page = _last(given, b"sec-fetch-mode") == "navigate" and _last(given, b"sec-fetch-dest") == "document"
    return shows_page and method in _READING


def _is_own(origin: str, host: str) -> bool:
    """Whether an origin has the host and port of a ``Host`` header. A proxy in front may have ended TLS, so the scheme counts
    only for its default port, and a ``Host`` without a port may mean either scheme's.
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
    """The host of a ``Host`` header, in its canonical form; empty for a malformed one."""
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
        return False  # the listener will say so
    return is_loopback(address[0])
