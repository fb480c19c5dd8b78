"""From the credentials of a call to who calls."""

from collections.abc import Mapping

from penstock_common.errors import PermissionDenied, Unauthenticated
from penstock_frontend.auth.api_keys import ApiKeys
from penstock_frontend.auth.principal import Principal, Scope
from penstock_frontend.auth.tokens import Tokens
from penstock_frontend.config import AuthConfig

_HOW = "send an API key or a token as 'authorization: Bearer ...', or an API key as 'x-api-key: ...'"


class Authenticator:
    """Knows API keys and tokens. The files are read anew when they change."""

    def __init__(self, config: AuthConfig) -> None:
        """Raises ConfigError for files that cannot be used."""
        self._keys = ApiKeys(config.api_keys, field="auth.api_keys") if config.api_keys else None
        self._tokens = Tokens(config.jwt) if config.jwt.jwks else None

    def principal(self, headers: Mapping[str, str], *, scope: Scope) -> Principal:
        """Who sent these headers (names in lower case). Raises Unauthenticated or PermissionDenied, without the credentials."""
        caller = self._caller(headers)
        if scope not in caller.scopes:
            raise PermissionDenied(
                f"{caller.name or 'the caller'} may not use this: it is for the scope {scope}", reason="SCOPE_MISSING"
            )
        return caller

    def _caller(self, headers: Mapping[str, str]) -> Principal:
        """Return who sent the first credentials that are valid: clients send a stale key of another server beside the right one.

        Raises Unauthenticated for the first header, if the credentials of none are valid.
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
            raise Unauthenticated(f"authorization must be Bearer; {_HOW}", reason="CREDENTIALS_WRONG")
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
