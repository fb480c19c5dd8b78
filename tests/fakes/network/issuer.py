"""Issuer of JSON Web Tokens for tests."""

import json
import time
from pathlib import Path
from typing import Any

import jwt
from cryptography.hazmat.primitives.asymmetric import ec

from penstock_frontend.config import JwtConfig
from tests.fakes.network.certificates import replace

ISSUER, AUDIENCE = "https://issuer.test", "penstock"


class Issuer:
    """Issuer with a key that signs tokens. ``kid``: id of the key in tokens and in the key set."""

    def __init__(self, kid: str = "key-1") -> None:
        self.kid = kid
        self.key = ec.generate_private_key(ec.SECP256R1())

    @property
    def jwk(self) -> dict[str, Any]:
        """Return the public key as a member of a key set."""
        public = json.loads(jwt.algorithms.ECAlgorithm.to_jwk(self.key.public_key()))
        return public | {"kid": self.kid, "alg": "ES256", "use": "sig"}

    def claims(self, **changes: Any) -> dict[str, Any]:
        """Return the claims of a valid token with changes. None removes a claim."""
        now = int(time.time())
        claims = {"iss": ISSUER, "aud": AUDIENCE, "sub": "carol", "exp": now + 600, "nbf": now - 60, "tenant": "globex"}
        return {name: value for name, value in (claims | changes).items() if value is not None}

    def token(self, *, headers: dict[str, Any] | None = None, **changes: Any) -> str:
        """Return a signed token."""
        head = {"kid": self.kid} | (headers or {})
        head = {name: value for name, value in head.items() if value is not None}
        return jwt.encode(self.claims(**changes), self.key, algorithm="ES256", headers=head)


def write_key_set(path: Path, *issuers: Issuer) -> JwtConfig:
    """Write the file of a key set, and return a configuration that uses it."""
    replace(path, json.dumps({"keys": [issuer.jwk for issuer in issuers]}).encode())
    return JwtConfig(jwks=str(path), issuer=ISSUER, audience=AUDIENCE, leeway=0.0)
