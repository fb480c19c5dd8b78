"""JSON Web Tokens (RFC 7519) checked against a JSON Web Key Set (RFC 7517)."""

from collections.abc import Mapping, Sequence
from typing import Any

import jwt
import msgspec

from penstock_common.errors import ConfigError, Unauthenticated
from penstock_common.observability.logging import get_logger
from penstock_common.security.watched import WatchedFiles, read_bytes
from penstock_frontend.auth.principal import Principal, Scope
from penstock_frontend.config import JwtConfig

_MAX_TOKEN_BYTES = 16 * 1024
_PRIVATE = ("d", "p", "q", "dp", "dq", "qi", "k")
"""Members of a JWK that nobody but the issuer may have."""


class _KeySet:
    """The usable keys of a set; equal when read from the same text."""

    def __init__(self, text: bytes, keys: Sequence[jwt.PyJWK]) -> None:
        self._text = text
        self.keys = keys

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _KeySet) and other._text == self._text

    __hash__ = None  # type: ignore[assignment]

    def pick(self, kid: object, algorithm: str) -> jwt.PyJWK | None:
        """The key that a token's header names; without a name, the only one for the algorithm."""
        fitting = [key for key in self.keys if key.algorithm_name == algorithm]
        if kid is not None:
            return next((key for key in fitting if key.key_id == kid), None)
        return fitting[0] if len(fitting) == 1 else None


class Tokens:
    """Checks tokens by the keys of a file, as it is now."""

    def __init__(self, config: JwtConfig) -> None:
        """Raises ConfigError."""
        self._config = config
        self._keys = WatchedFiles((config.jwks,), lambda: _read(config.jwks), what="keys of auth.jwt.jwks")

    def principal(self, token: str) -> Principal:
        """Whose token this is. Raises Unauthenticated, which says what is wrong and nothing of the token's text."""
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
            raise _wrong(f"it has {len(token)} characters; the limit is {_MAX_TOKEN_BYTES}")
        try:
            header = jwt.get_unverified_header(token)
            algorithm = header.get("alg")
            if not isinstance(algorithm, str) or algorithm not in self._config.algorithms:
                raise _wrong(f"its algorithm is not one of {', '.join(self._config.algorithms)}")
            key = self._keys.current().pick(header.get("kid"), algorithm)
            if key is None:
                raise _wrong("none of the known keys is for it")
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
            raise _wrong("it is not valid yet") from None
        except jwt.InvalidAudienceError:
            raise _wrong("it is for another audience") from None
        except jwt.InvalidIssuerError:
            raise _wrong("it is of another issuer") from None
        except jwt.MissingRequiredClaimError as e:
            raise _wrong(f"it has no claim {e.claim}") from None
        except jwt.InvalidSignatureError:
            raise _wrong("its signature is wrong") from None
        except (jwt.PyJWTError, ValueError, TypeError):
            # What the parser says may quote the token.
            raise _wrong("it is malformed") from None
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
        raise ConfigError(f"{field}: {path} has no key for signatures that is understood")
    return _KeySet(text, usable)


def _key(member: object, where: str) -> jwt.PyJWK | None:
    """None for what issuers have in their sets for others: keys for encryption, and of kinds that are not known here."""
    if not isinstance(member, dict):
        raise ConfigError(f"{where} is not an object")
    if member.get("kty") == "oct":
        raise ConfigError(f"{where} is a symmetric key; whoever can check tokens with it can make them")
    if any(name in member for name in _PRIVATE):
        raise ConfigError(f"{where} holds a private key; this service needs the public one alone")
    if member.get("use", "sig") != "sig":
        return None
    try:
        return jwt.PyJWK(member)
    except jwt.PyJWTError as e:
        get_logger().warning("a key is left out", key=where, problem=str(e))
        return None


def _scopes(claims: Mapping[str, Any]) -> frozenset[str]:
    """``scope`` as RFC 8693 has it, words in a text, or the lists that some issuers write, also as ``scp``."""
    value = claims.get("scope", claims.get("scp", ""))
    words = value.split() if isinstance(value, str) else value
    return frozenset(word for word in words if isinstance(word, str)) if isinstance(words, list) else frozenset()


def _text(claims: Mapping[str, Any], name: str) -> str:
    value = claims.get(name, "")
    if not isinstance(value, str):
        raise _wrong(f"its claim {name} is not a text")
    return value


def _wrong(what: str) -> Unauthenticated:
    return Unauthenticated(f"the token is not accepted: {what}", reason="CREDENTIALS_WRONG")
