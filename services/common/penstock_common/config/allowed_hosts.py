"""Host names by which clients may call a listener, and origins of web pages that may call the listener in a browser."""

import ipaddress
import re
from collections.abc import Sequence

from penstock_common.errors import ConfigError

ANY_HOST = "*"
_LABELS = r"[a-z0-9_]([a-z0-9_-]*[a-z0-9_])?(\.[a-z0-9_]([a-z0-9_-]*[a-z0-9_])?)*"
_NAME = re.compile(rf"(\*\.)?{_LABELS}")
_LOOPBACK = ("localhost", "*.localhost", "127.0.0.0/8", "::1")
"""Hosts that browsers always resolve to the user's own machine. No web site can let these names point elsewhere."""


class AllowedHosts:
    """Set of allowed hosts: ``entries``, the loopback names, and ``bound``, the host that the listener binds to.

    An entry is a name, ``*.NAME`` (every name below NAME), an IP address, a network such as ``10.0.0.0/8``, or ``*``
    (any host).
    """

    def __init__(self, entries: Sequence[str], *, field: str, bound: str = "") -> None:
        """Parse the entries. Raises ConfigError, naming ``field``, for an invalid entry."""
        self._field = field
        self.any = ANY_HOST in entries
        self._names: set[str] = set()
        self._suffixes: list[str] = []
        self._networks: list[ipaddress.IPv4Network | ipaddress.IPv6Network] = []
        for entry in (*_LOOPBACK, *entries):
            self._add(entry)
        if bound:
            self._names.add(canonical_host(bound))

    def __contains__(self, host: str) -> bool:
        """Return whether ``host`` is allowed. ``host`` must have the form that ``canonical_host`` returns."""
        if self.any or host in self._names or host.endswith(tuple(self._suffixes)):
            return True
        try:
            address = ipaddress.ip_address(host)
        except ValueError:
            return False
        return any(address in network for network in self._networks)

    def _add(self, entry: str) -> None:
        if entry == ANY_HOST:
            return
        try:
            self._networks.append(ipaddress.ip_network(entry.removeprefix("[").removesuffix("]")))
        except ValueError:
            if _NAME.fullmatch(entry) is None or _is_numeric(entry):
                raise ConfigError(
                    f"{self._field}: {entry!r} must be a host in lower case without a port, *.HOST, an IP address, a "
                    "network such as 10.0.0.0/8, or *"
                ) from None
            if entry.startswith("*."):
                self._suffixes.append(entry[1:])
            else:
                self._names.add(entry)


def _is_numeric(entry: str) -> bool:
    """Return whether the last label of a host is a number. Such a host is not a name.

    The caller has excluded valid IPv4 addresses.
    """
    return entry.rpartition(".")[2].isdigit()


def canonical_host(host: str) -> str:
    """Return ``host`` in lower case, without brackets and without a trailing dot.

    IP addresses take their shortest form. An IPv4 address inside an IPv6 address becomes the IPv4 address.
    """
    host = host.lower().removeprefix("[").removesuffix("]").removesuffix(".")
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host
    return str(getattr(address, "ipv4_mapped", None) or address)


# Origins that ``http.allowed_origins`` lists.

ANY_ORIGIN = "*"
_ENTRY = re.compile(r"\*|null|[a-z][a-z0-9+.-]*://(\*|[^/*\s]*)")


class AllowedOrigins:
    """Set of allowed values of the ``Origin`` header.

    An entry is an origin as browsers send it, ``SCHEME://*`` (every origin of that scheme), ``null`` or ``*`` (any
    origin).
    """

    def __init__(self, entries: Sequence[str]) -> None:
        """Parse the entries. Raises ConfigError, naming ``http.allowed_origins``, for an invalid entry."""
        for entry in entries:
            if _ENTRY.fullmatch(entry) is None or entry != entry.lower():
                raise ConfigError(
                    f"http.allowed_origins: {entry!r} must be an origin in lower case without a path, such as "
                    "https://example.org, "
                    "or SCHEME://*, null or *"
                )
        self.any = ANY_ORIGIN in entries
        self._schemes = tuple(entry.removesuffix("*") for entry in entries if entry.endswith("://*"))
        self.exact = tuple(entry for entry in entries if not entry.endswith("://*"))
        """Entries that do not have the form ``SCHEME://*``."""

    @property
    def pattern(self) -> str | None:
        """Return a regular expression for the entries ``SCHEME://*``, or None if there are no such entries."""
        return rf"({'|'.join(map(re.escape, self._schemes))}).*" if self._schemes else None

    def __contains__(self, origin: str) -> bool:
        return self.any or origin in self.exact or origin.startswith(self._schemes)
