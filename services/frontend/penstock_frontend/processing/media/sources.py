"""Rules about the hosts from which media may be fetched, and errors for media that are refused."""

import ipaddress
import re
from collections.abc import Sequence
from typing import NamedTuple
from urllib.parse import quote, urlsplit

from penstock_common.errors import (
    FailedPrecondition,
    InvalidArgument,
    PermissionDenied,
    RequestFailed,
    Unavailable,
    quoted,
)
from penstock_frontend.config.media import ANY_DOMAIN, Network

# The functions below return the errors for media that are refused. No message contains the content of media, or the
# path or query of a URL.

UNREADABLE = "MEDIA_UNREADABLE"
TOO_LARGE = "MEDIA_TOO_LARGE"
TOO_MANY = "MEDIA_TOO_MANY"
NOT_ALLOWED = "MEDIA_NOT_ALLOWED"
FETCH_FAILED = "MEDIA_FETCH_FAILED"


def unreadable(field: str, why: str) -> InvalidArgument:
    """Return the error for an invalid or broken media item.

    ``why`` is the text after the name of the field in the message, such as ``is empty``.
    """
    return InvalidArgument(f"{field} {why}", field=field, reason=UNREADABLE)


def too_large(field: str, what: str, setting: str, limit: float) -> InvalidArgument:
    """Return the error for a media item that exceeds a limit.

    ``what`` is the text after the name of the field in the message, such as ``has 70000000 pixels``.
    """
    # Media workers send limits as floats. Convert whole numbers to integers, so that the message has 64000000 and not
    # 64000000.0 pixels.
    number = int(limit) if limit == int(limit) else limit
    return InvalidArgument(f"{field} {what}; {setting} is {number}", field=field, reason=TOO_LARGE)


def too_many(field: str, modality: str, count: int, limit: int) -> InvalidArgument:
    """Return the error for a request that has too many media items of one modality."""
    setting = f"limits.max_media.{modality}"
    return InvalidArgument(
        f"the request has {count} {modality} items; {setting} is {limit}", field=field, reason=TOO_MANY
    )


def not_allowed(field: str, why: str) -> PermissionDenied:
    """Return the error for a media source that this frontend does not allow."""
    return PermissionDenied(f"{field} {why}", field=field, reason=NOT_ALLOWED)


def shutting_down() -> Unavailable:
    """Return the error for a frontend that is shutting down."""
    return Unavailable("this frontend is shutting down", reason="SHUTTING_DOWN", retry_after=1.0)


def fetch_failed(field: str, why: str, *, for_now: bool) -> RequestFailed:
    """Return the error for a media item whose host sent no file. ``for_now`` is True if a later attempt may succeed.

    The error is never Unavailable. That code would trigger automatic retries of a request that names a dead host, and
    gateways would assume that this frontend is down.
    """
    kind = FailedPrecondition if for_now else InvalidArgument
    return kind(f"{field} could not be fetched: {why}", field=field, reason=FETCH_FAILED)


Address = ipaddress.IPv4Address | ipaddress.IPv6Address

_LONGEST_URL = 8192
_PORTS = {"https": 443, "http": 80}
_HOST = re.compile(r"[a-z0-9_]([a-z0-9_-]*[a-z0-9_])?(\.[a-z0-9_]([a-z0-9_-]*[a-z0-9_])?)*")
_SAFE = "/%:@!$&'()*+,;=~-._"
"""Characters that are not percent-encoded in the path of a URL."""
_NUMERIC = re.compile(r"([0-9]+|0x[0-9a-f]*)")
"""Pattern for the last label of a host name. If the pattern matches, C libraries read the host as an IPv4 address in
some notation.
"""

_NOT_PUBLIC = tuple(
    ipaddress.ip_network(network)
    for network in (
        "0.0.0.0/8",  # addresses of this host
        "10.0.0.0/8",
        "100.64.0.0/10",  # carrier-grade NAT
        "127.0.0.0/8",
        "169.254.0.0/16",  # link-local, including metadata services of clouds
        "172.16.0.0/12",
        "192.0.0.0/24",
        "192.0.2.0/24",
        "192.88.99.0/24",  # 6to4 relays
        "192.168.0.0/16",
        "198.18.0.0/15",
        "198.51.100.0/24",
        "203.0.113.0/24",
        "224.0.0.0/4",  # multicast
        "240.0.0.0/4",
        "2001::/23",  # Teredo and other protocols
        "2001:db8::/32",
        "2002::/16",  # 6to4, which contains an IPv4 address
        "3fff::/20",
    )
)
_GLOBAL_UNICAST = ipaddress.IPv6Network("2000::/3")
"""Range of public (global unicast) IPv6 addresses. All other ranges have special uses, such as mapped IPv4, NAT64,
unique local, link-local and multicast.
"""


class Target(NamedTuple):
    """Parsed URL of a media file that can be fetched."""

    scheme: str
    host: str
    """Host name in lower case, or IP address without brackets."""
    port: int
    path: str
    """Percent-encoded path of the URL, including the query."""

    @property
    def is_tls(self) -> bool:
        """Whether the connection to the host uses TLS."""
        return self.scheme == "https"

    @property
    def authority(self) -> str:
        """Host and port, as the value of the Host header."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == _PORTS[self.scheme] else f"{host}:{self.port}"

    @property
    def address(self) -> Address | None:
        """IP address of the host, if the URL has an address instead of a name. Otherwise None."""
        return _address(self.host)

    @property
    def url(self) -> str:
        """The whole URL, against which redirects are resolved."""
        return f"{self.scheme}://{self.authority}{self.path}"


def read_url(url: str, *, field: str) -> Target:
    """Parse an ``http:`` or ``https:`` URL.

    Raises PermissionDenied for other schemes and for URLs with credentials, and InvalidArgument for a URL that is not
    valid. A host name with non-ASCII characters is invalid, and must be written as in DNS (``xn--``).
    """
    if len(url) > _LONGEST_URL:
        raise too_large(field, f"is a URL of {len(url)} characters", "the limit", _LONGEST_URL)
    if any(character <= " " or character in "\\\x7f" for character in url):
        # urlsplit would silently remove some of these characters
        raise _no_url(field)
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise _no_url(field) from None
    scheme = parts.scheme.lower()
    if scheme not in _PORTS:
        raise not_allowed(field, "must be a data:, https: or http: URL; write base64 as data:;base64,...")
    if "@" in parts.netloc:
        raise not_allowed(field, "is a URL with credentials, which are never sent")
    if (host := _host(parts.netloc)) is None or port == 0:
        raise _no_url(field)
    path = quote(parts.path or "/", safe=_SAFE)
    query = "?" + quote(parts.query, safe=_SAFE + "?[]") if parts.query else ""
    return Target(scheme, host, port if port is not None else _PORTS[scheme], path + query)


def _host(netloc: str) -> str | None:
    """Return the host in lower case. Return None if the host is neither a name nor an IP address in canonical form."""
    netloc = netloc.lower()
    if netloc.startswith("["):
        inner, bracket, port = netloc[1:].partition("]")
        address = _address(inner)
        well_formed = bracket and (not port or port[0] == ":") and isinstance(address, ipaddress.IPv6Address)
        return str(address) if well_formed and "%" not in inner else None
    host = netloc.partition(":")[0]
    if len(host) > 253 or _HOST.fullmatch(host) is None:
        return None
    if _NUMERIC.fullmatch(host.rpartition(".")[2]):
        address = _address(host)
        return host if address is not None and str(address) == host else None
    return host


def _address(host: str) -> Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def _no_url(field: str) -> InvalidArgument:
    return unreadable(field, "is not a URL that can be fetched")


def check_domain(target: Target, allowed: Sequence[str], *, field: str) -> None:
    """Raise PermissionDenied if ``media.allowed_domains`` does not contain the host and port of the URL."""
    if not any(_names(domain, target) for domain in allowed):
        raise not_allowed(
            field,
            f"is on {quoted(target.authority)}, which is not in media.allowed_domains"
            if allowed
            else "is a URL, but media.allowed_domains is empty; send the file itself or a data: URL",
        )


def _names(domain: str, target: Target) -> bool:
    pattern, _, port = domain.rpartition(":") if re.search(r":[0-9]+$", domain) else (domain, "", "")
    if target.port != (int(port) if port else _PORTS[target.scheme]):
        return False
    if pattern == ANY_DOMAIN:
        return True
    if pattern.startswith("*."):
        return target.address is None and target.host.endswith(pattern[1:])
    return target.host == pattern or _address(pattern.strip("[]")) == target.address is not None


def is_allowed_address(text: str, private: Sequence[Network]) -> bool:
    """Return whether the frontend may connect to an IP address.

    The frontend may connect to public addresses, and to addresses in one of the networks ``private``.
    """
    address = _address(text)
    if address is None or getattr(address, "scope_id", None):
        return False
    if any(address in network for network in private):
        return True
    if isinstance(address, ipaddress.IPv6Address) and address not in _GLOBAL_UNICAST:
        return False
    return address.is_global and not any(address in network for network in _NOT_PUBLIC)
