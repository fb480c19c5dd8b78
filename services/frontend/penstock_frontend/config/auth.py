"""Who may call."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from penstock_common.config.checks import check_fields, require
from penstock_common.errors import ConfigError

# Symmetric ones are missing on purpose: with them, whoever can check a token can make one.
JwtAlgorithm = Literal["RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA"]


class JwtConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """JSON Web Tokens that callers may show; off while ``jwks`` is empty."""

    jwks: Annotated[
        str,
        Meta(
            description="Path of the issuer's public keys, a JSON Web Key Set that is read anew when it changes; empty: no "
            "tokens."
        ),
    ] = ""
    issuer: Annotated[str, Meta(description="What the claim iss must say; required with tokens.")] = ""
    audience: Annotated[str, Meta(description="What the claim aud must say; required with tokens.")] = ""
    algorithms: Annotated[
        tuple[JwtAlgorithm, ...], Meta(description="Signature algorithms that are taken; at least one with tokens.")
    ] = ("RS256", "ES256", "EdDSA")
    leeway: Annotated[float, Meta(ge=0, le=600, description="Seconds by which clocks may differ.")] = 30.0
    tenant_claim: Annotated[str, Meta(description="Claim that names the caller's tenant; required with tokens.")] = (
        "tenant"
    )
    scope: Annotated[str, Meta(description="What the claim scope must have for inference; empty: nothing.")] = ""
    admin_scope: Annotated[
        str, Meta(description="What the claim scope must have for the operators' API; required with tokens.")
    ] = "penstock-admin"

    def __post_init__(self) -> None:
        check_fields("auth.jwt", self)
        if not self.jwks:
            return
        require("auth.jwt.issuer", self.issuer)
        require("auth.jwt.audience", self.audience)
        require("auth.jwt.tenant_claim", self.tenant_claim)
        require("auth.jwt.admin_scope", self.admin_scope)
        if not self.algorithms:
            raise ConfigError("auth.jwt.algorithms is empty; at least one is required")


class AuthConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Who may call. Callers are asked for credentials as soon as ``api_keys`` or ``jwt.jwks`` is set; ``/health``, ``/ping`` and
    gRPC's health service are always open.
    """

    api_keys: Annotated[
        str,
        Meta(
            description="Path of a file with a key per line, which is read anew when it changes (docs/security.md has its form); "
            "empty: no keys."
        ),
    ] = ""
    jwt: JwtConfig = JwtConfig()
    admin: Annotated[bool, Meta(description="The operators' API asks for credentials.")] = False
    metrics: Annotated[bool, Meta(description="/metrics asks for credentials.")] = False
    cluster: Annotated[bool, Meta(description="/cluster, which the page reads, asks for credentials.")] = True

    def __post_init__(self) -> None:
        for name in ("admin", "metrics"):
            if getattr(self, name) and not self.enabled:
                raise ConfigError(f"auth.{name} is true; it needs auth.api_keys or auth.jwt.jwks")

    @property
    def enabled(self) -> bool:
        """Whether callers are asked for credentials."""
        return bool(self.api_keys or self.jwt.jwks)
