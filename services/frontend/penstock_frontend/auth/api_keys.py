"""API keys: a file with one per line.

A line is the key, then what it stands for; empty lines and what follows ``#`` count for nothing::

    # key, or sha256: and the key's SHA-256 in hex
    sk-4f2c...                                  name=alice tenant=acme
    sha256:9f86d081884c7d659a2feaa0c55ad015...  name=gateway tenant=*
    sk-88d1...                                  name=oncall scopes=inference,admin

``tenant=*`` may speak for every tenant. Without ``tenant`` the key's requests have none.
"""

import hashlib
import hmac
import re
import typing
from collections.abc import Iterator

import msgspec

from penstock_common.errors import ConfigError
from penstock_common.security.watched import WatchedFiles, read_bytes
from penstock_frontend.auth.principal import Principal, Scope

_MIN_KEY_CHARS = 16
_MAX_KEYS = 1000
_DIGEST = re.compile(r"sha256:([0-9a-fA-F]{64})")
_SCOPES: tuple[str, ...] = typing.get_args(Scope)


class _Key(msgspec.Struct, frozen=True):
    digest: bytes
    principal: Principal


class ApiKeys:
    """The keys of a file, as it is now."""

    def __init__(self, path: str, *, field: str) -> None:
        """Raises ConfigError that names the line, and never says what is in it."""
        self._keys = WatchedFiles((path,), lambda: tuple(_parse(path, field=field)), what=f"API keys of {field}")

    def find(self, key: str) -> Principal | None:
        """Whose key this is. Takes as long for a wrong key as for any right one."""
        digest = hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
        found = None
        for each in self._keys.current():
            if hmac.compare_digest(each.digest, digest):
                found = each.principal
        return found


def _parse(path: str, *, field: str) -> Iterator[_Key]:
    try:
        text = read_bytes(path, field=field).decode("utf-8")
    except UnicodeDecodeError:
        raise ConfigError(f"{field}: {path} is not UTF-8") from None
    seen: dict[bytes, int] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        words = _words(line)
        if not words:
            continue
        where = f"{field}: {path}, line {number}"
        key = _Key(_digest(words[0], where), _principal(words[1:], where, number))
        if key.digest in seen:
            raise ConfigError(f"{where}: the key stands in line {seen[key.digest]} already")
        seen[key.digest] = number
        yield key
    if not seen:
        raise ConfigError(f"{field}: {path} has no key; nobody could call")
    if len(seen) > _MAX_KEYS:
        raise ConfigError(f"{field}: {path} has {len(seen)} keys; the limit is {_MAX_KEYS}")


def _words(line: str) -> list[str]:
    words = line.split()
    comment = next((index for index, word in enumerate(words) if word.startswith("#")), len(words))
    return words[:comment]


def _digest(word: str, where: str) -> bytes:
    if (match := _DIGEST.fullmatch(word)) is not None:
        return bytes.fromhex(match[1])
    if word.startswith("sha256:"):
        raise ConfigError(f"{where}: sha256: must be followed by 64 hexadecimal digits")
    if "=" in word.rstrip("=") and word.split("=")[0] in ("name", "tenant", "scopes"):
        raise ConfigError(f"{where}: the key must come first")
    if len(word) < _MIN_KEY_CHARS:
        raise ConfigError(f"{where}: the key has {len(word)} characters; it must have at least {_MIN_KEY_CHARS}")
    return hashlib.sha256(word.encode()).digest()


def _principal(words: list[str], where: str, number: int) -> Principal:
    values = {"name": f"key in line {number}", "tenant": "", "scopes": "inference"}
    for word in words:
        name, found, value = word.partition("=")
        if not found or name not in values:
            raise ConfigError(f"{where}: after the key, only name=, tenant= and scopes= are known")
        values[name] = value
    scopes = values["scopes"].split(",")
    for scope in scopes:
        if scope not in _SCOPES:
            raise ConfigError(f"{where}: scopes={values['scopes']}; known: {', '.join(_SCOPES)}")
    any_tenant = values["tenant"] == "*"
    return Principal(
        name=values["name"],
        tenant="" if any_tenant else values["tenant"],
        any_tenant=any_tenant,
        scopes=frozenset(typing.cast("list[Scope]", scopes)),
    )
