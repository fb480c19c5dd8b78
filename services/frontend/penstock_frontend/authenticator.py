"""Authentication of callers by API key or JSON Web Token."""

import hashlib
import hmac
import re
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jwt
import msgspec

from penstock_common.errors import ConfigError, PermissionDenied, Unauthenticated
from penstock_common.observability.logging import get_logger
from penstock_common.security.reloaded_files import WatchedFiles, read_bytes
from penstock_frontend.call_types import Principal, Scope
from penstock_frontend.config import AuthConfig, JwtConfig

# The code below verifies JSON Web Tokens (RFC 7519) with the keys of a JSON Web Key Set (RFC 7517).

_MAX_TOKEN_BYTES = 16 * 1024
_PRIVATE = ("d", "p", "q", "dp", "dq", "qi", "k")
"""Names of the private members of a JSON Web Key (JWK). Only the issuer of tokens may have these members."""


class _KeySet:
    """Usable keys of a JSON Web Key Set. Two key sets are equal if they were read from the same text."""

    def __init__(self, text: bytes, keys: Sequence[jwt.PyJWK]) -> None:
        self._text = text
        self.keys = keys

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _KeySet) and other._text == self._text

    __hash__ = None  # type: ignore[assignment]

    def pick(self, kid: object, algorithm: str) -> jwt.PyJWK | None:
        """Return the key that the header of a token names.

        If the header names no key, return the key for the algorithm, provided that there is exactly one.
        """
        fitting = [key for key in self.keys if key.algorithm_name == algorithm]
        if kid is not None:
            return next((key for key in fitting if key.key_id == kid), None)
        return fitting[0] if len(fitting) == 1 else None


class Tokens:
    """Verifies tokens with the keys in a file, and reloads the file when it changes."""

    def __init__(self, config: JwtConfig) -> None:
        """Read the file with the keys. Raises ConfigError if the file cannot be used."""
        self._config = config
        self._keys = WatchedFiles((config.jwks,), lambda: _read(config.jwks), what="keys of auth.jwt.jwks")

    def principal(self, token: str) -> Principal:
        """Return the caller that a token identifies.

        Raises Unauthenticated if the token is not valid. The error message never contains the text of the token.
        """
        claims = self._claims(token)
        scopes = _scopes(claims)
        allowed: set[Scope] = set()
        if not self._config.scope or self._config.scope in scopes:
            allowed.add("inference")
        if self._config.admin_scope in scopes:
            allowed.add("admin")
        return Principal(
            name=_text(claims, "sub"), tenant=_text(claims, self._config.tenant_claim), scopes=frozenset(allowed)
        )

    def _claims(self, token: str) -> Mapping[str, Any]:
        if len(token) > _MAX_TOKEN_BYTES:
            raise _wrong(f"the token has {len(token)} characters; the limit is {_MAX_TOKEN_BYTES}")
        try:
            header = jwt.get_unverified_header(token)
            algorithm = header.get("alg")
            if not isinstance(algorithm, str) or algorithm not in self._config.algorithms:
                raise _wrong(f"the algorithm of the token is not one of {', '.join(self._config.algorithms)}")
            key = self._keys.current().pick(header.get("kid"), algorithm)
            if key is None:
                raise _wrong("this server's key set has no key with the key id and the algorithm of the token")
            claims: dict[str, Any] = jwt.decode(
                token,
                key,
                algorithms=[algorithm],
                audience=self._config.audience,
                issuer=self._config.issuer,
                leeway=self._config.leeway,
                options={"require": ["exp", "iss", "aud"]},
            )
        except jwt.ExpiredSignatureError:
            raise Unauthenticated("the token has expired", reason="TOKEN_EXPIRED") from None
        except jwt.ImmatureSignatureError:
            raise _wrong("the token is not valid yet") from None
        except jwt.InvalidAudienceError:
            raise _wrong("the token was issued for another audience than this server") from None
        except jwt.InvalidIssuerError:
            raise _wrong("the issuer of the token is not the issuer that this server accepts") from None
        except jwt.MissingRequiredClaimError as e:
            raise _wrong(f"the token has no claim {e.claim}") from None
        except jwt.InvalidSignatureError:
            raise _wrong("the signature of the token is wrong") from None
        except (jwt.PyJWTError, ValueError, TypeError):
            # Do not pass on the JSON parser's message, because it may quote the token.
            raise _wrong("the token is malformed") from None
        return claims


def _read(path: str) -> _KeySet:
    field = "auth.jwt.jwks"
    text = read_bytes(path, field=field)
    try:
        found = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise ConfigError(f"{field}: {path} is not JSON") from None
    members = found.get("keys") if isinstance(found, dict) else None
    if not isinstance(members, list) or not members:
        raise ConfigError(f"{field}: {path} has no keys; a JSON Web Key Set is expected")
    keys = [_key(member, f"{field}: {path}, keys[{index}]") for index, member in enumerate(members)]
    usable = [key for key in keys if key is not None]
    if not usable:
        raise ConfigError(f"{field}: {path} has no supported signature key")
    return _KeySet(text, usable)


def _key(member: object, where: str) -> jwt.PyJWK | None:
    """Return the key that an entry of the key set describes.

    Return None if the key is not for signatures or not supported: issuers publish such keys for other purposes.
    """
    if not isinstance(member, dict):
        raise ConfigError(f"{where} is not an object")
    if member.get("kty") == "oct":
        raise ConfigError(
            f"{where} is a symmetric key, with which every party that verifies tokens can also create tokens; "
            "use an asymmetric key"
        )
    if any(name in member for name in _PRIVATE):
        raise ConfigError(f"{where} contains a private key; this service needs only the public key")
    if member.get("use", "sig") != "sig":
        return None
    try:
        return jwt.PyJWK(member)
    except jwt.PyJWTError as e:
        get_logger().warning("skipped an unsupported key of auth.jwt.jwks", key=where, problem=str(e))
        return None


def _scopes(claims: Mapping[str, Any]) -> frozenset[str]:
    """Return the scopes (permissions) in the claim ``scope`` or ``scp`` of a token.

    The value of the claim is a text with spaces between the scopes (RFC 8693), or a list, as some issuers send it.
    """
    value = claims.get("scope", claims.get("scp", ""))
    words = value.split() if isinstance(value, str) else value
    return frozenset(word for word in words if isinstance(word, str)) if isinstance(words, list) else frozenset()


def _text(claims: Mapping[str, Any], name: str) -> str:
    value = claims.get(name, "")
    if not isinstance(value, str):
        raise _wrong(f"the claim {name} of the token is not a text")
    return value


def _wrong(what: str) -> Unauthenticated:
    return Unauthenticated(f"the token is not accepted: {what}", reason="CREDENTIALS_WRONG")


# API keys: a file with one key per line.
#
# Each line has a key, followed by the properties of the key. Empty lines and text after ``#`` are ignored::
#
#     # key, or sha256: and the key's SHA-256 in hex
#     sk-4f2c...                                  name=alice tenant=acme
#     sha256:9f86d081884c7d659a2feaa0c55ad015...  name=gateway tenant=*
#     sk-88d1...                                  name=oncall scopes=inference,admin
#
# ``tenant=*`` allows the caller to act for every tenant. Without ``tenant``, requests with this key have no tenant.

_MIN_KEY_CHARS = 16
_MAX_KEYS = 1000
_DIGEST = re.compile(r"sha256:([0-9a-fA-F]{64})")
_SCOPES: tuple[str, ...] = typing.get_args(Scope)


class _Key(msgspec.Struct, frozen=True):
    digest: bytes
    principal: Principal


class ApiKeys:
    """API keys from a file. The file is reloaded when it changes."""

    def __init__(self, path: str, *, field: str) -> None:
        """Read the file. Raises ConfigError with the number of a faulty line, but never with the line's content."""
        self._keys = WatchedFiles((path,), lambda: tuple(_parse(path, field=field)), what=f"API keys of {field}")

    def find(self, key: str) -> Principal | None:
        """Return the caller to whom an API key belongs. Return None for an unknown key.

        The lookup takes the same time for unknown and for valid keys.
        """
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
            raise ConfigError(f"{where}: the key is already in line {seen[key.digest]}")
        seen[key.digest] = number
        yield key
    if not seen:
        raise ConfigError(f"{field}: {path} has no keys, so no client could call this server; add at least one key")
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
        raise ConfigError(f"{where}: the key begins with 'sha256:'; 64 hexadecimal digits must follow")
    if "=" in word.rstrip("=") and word.split("=")[0] in ("name", "tenant", "scopes"):
        raise ConfigError(f"{where}: the key must be the first word of the line")
    if len(word) < _MIN_KEY_CHARS:
        raise ConfigError(f"{where}: the key has {len(word)} characters; it must have at least {_MIN_KEY_CHARS}")
    return hashlib.sha256(word.encode()).digest()


def _principal(words: list[str], where: str, number: int) -> Principal:
    values = {"name": f"key in line {number}", "tenant": "", "scopes": "inference"}
    for word in words:
        name, found, value = word.partition("=")
        if not found or name not in values:
            raise ConfigError(f"{where}: after the key, a line may have only name=, tenant= and scopes=")
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


_HOW = "send an API key or a token as 'authorization: Bearer ...', or an API key as 'x-api-key: ...'"


class Authenticator:
    """Authenticates callers by API key or by JSON Web Token. The files with keys are reloaded when they change."""

    def __init__(self, config: AuthConfig) -> None:
        """Read the files with keys. Raises ConfigError if a file cannot be used."""
        self._keys = ApiKeys(config.api_keys, field="auth.api_keys") if config.api_keys else None
        self._tokens = Tokens(config.jwt) if config.jwt.jwks else None

    def principal(self, headers: Mapping[str, str], *, scope: Scope) -> Principal:
        """Return the caller that the headers of a call identify.

        Raises Unauthenticated if the credentials are not valid, and PermissionDenied if the caller lacks the scope.

        Header names must be in lower case. Error messages never contain the credentials.
        """
        caller = self._caller(headers)
        if scope not in caller.scopes:
            raise PermissionDenied(
                f"{caller.name or 'the caller'} may not make this call, which requires the scope {scope}",
                reason="SCOPE_MISSING",
            )
        return caller

    def _caller(self, headers: Mapping[str, str]) -> Principal:
        """Return the caller of the first header that has valid credentials.

        Other headers may have credentials that are not valid, for example an old key of another server.

        If no header has valid credentials, this method raises the Unauthenticated error of the first header.
        """
        refused: list[Unauthenticated] = []
        for name, check in (("authorization", self._bearer), ("x-api-key", self._key)):
            if not headers.get(name, "").strip():
                continue
            try:
                return check(headers[name].strip())
            except Unauthenticated as e:
                refused.append(e)
        raise refused[0] if refused else Unauthenticated(f"credentials are missing; {_HOW}")

    def _bearer(self, authorization: str) -> Principal:
        scheme, _, rest = authorization.partition(" ")
        credential = rest.strip()
        if scheme.lower() != "bearer":
            raise Unauthenticated(
                f"the authorization header does not have the form 'Bearer KEY'; {_HOW}", reason="CREDENTIALS_WRONG"
            )
        if not credential:
            raise Unauthenticated(f"credentials are missing; {_HOW}")
        if self._keys is not None and (found := self._keys.find(credential)) is not None:
            return found
        if self._tokens is not None and (self._keys is None or credential.count(".") == 2):
            return self._tokens.principal(credential)
        raise _unknown()

    def _key(self, credential: str) -> Principal:
        if self._keys is not None and (found := self._keys.find(credential)) is not None:
            return found
        raise _unknown()


def _unknown() -> Unauthenticated:
    return Unauthenticated(f"the API key is not known; {_HOW}", reason="CREDENTIALS_WRONG")
