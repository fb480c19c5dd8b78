"""Key sets: accepted and refused keys of issuers."""

import json
from pathlib import Path
from typing import Any

import pytest

from penstock_common.errors import ConfigError, Unauthenticated
from penstock_frontend.authenticator import Tokens
from penstock_frontend.config import AuthConfig, JwtConfig
from tests.fakes.network.issuer import AUDIENCE, ISSUER, Issuer


def tokens(tmp_path: Path, *members: Any, **settings: Any) -> Tokens:
    (tmp_path / "jwks.json").write_text(json.dumps({"keys": members}))
    return Tokens(JwtConfig(jwks=str(tmp_path / "jwks.json"), issuer=ISSUER, audience=AUDIENCE, **settings))


def test_keys_for_encryption_and_of_unknown_kinds_are_left_out(tmp_path: Path) -> None:
    issuer = Issuer()
    for_encryption = {"kty": "RSA", "use": "enc", "alg": "RSA-OAEP", "kid": "enc", "n": "AQAB", "e": "AQAB"}
    unknown = {"kty": "lattice", "kid": "later"}
    found = tokens(tmp_path, for_encryption, unknown, issuer.jwk)
    assert found.principal(issuer.token()).name == "carol"


def test_the_only_key_need_not_be_named(tmp_path: Path) -> None:
    issuer = Issuer()
    found = tokens(tmp_path, issuer.jwk)
    assert found.principal(issuer.token(headers={"kid": None})).tenant == "globex"


@pytest.mark.parametrize(
    ("member", "why"),
    [
        ({"kty": "oct", "k": "c2VjcmV0"}, "keys[0] is a symmetric key"),
        (Issuer().jwk | {"d": "c2VjcmV0"}, "keys[0] contains a private key"),
        ("key", "keys[0] is not an object"),
        ({"kty": "lattice"}, "has no supported signature key"),
    ],
)
def test_what_should_not_be_in_a_set_is_refused_without_showing_it(member: Any, why: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"auth.jwt.jwks: .*jwks.json") as error:
        tokens(tmp_path, member)
    assert why in str(error.value)
    assert "c2VjcmV0" not in str(error.value)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"keys": []}', '{"keys": {}}', "\xff"])
def test_a_file_that_is_no_key_set_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "jwks.json").write_text(text, encoding="latin-1")
    with pytest.raises(ConfigError, match=r"auth.jwt.jwks: .*jwks.json (is not JSON|has no keys)"):
        Tokens(JwtConfig(jwks=str(tmp_path / "jwks.json"), issuer=ISSUER, audience=AUDIENCE))


def test_clocks_may_differ_by_the_leeway(tmp_path: Path) -> None:
    issuer = Issuer()
    late = issuer.token(exp=issuer.claims()["exp"] - 620)
    assert tokens(tmp_path, issuer.jwk, leeway=60.0).principal(late).name == "carol"
    with pytest.raises(Unauthenticated, match="expired"):
        tokens(tmp_path, issuer.jwk, leeway=5.0).principal(late)


@pytest.mark.parametrize(
    ("claims", "scopes"),
    [
        ({"scope": "chat penstock-admin"}, {"inference", "admin"}),
        ({"scp": ["chat"]}, {"inference"}),
        ({"scope": "chatty"}, set()),
        ({"scope": 7}, set()),
        ({}, set()),
    ],
)
def test_scopes_open_what_they_are_for(claims: dict[str, Any], scopes: set[str], tmp_path: Path) -> None:
    issuer = Issuer()
    assert tokens(tmp_path, issuer.jwk, scope="chat").principal(issuer.token(**claims)).scopes == scopes


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"jwks": "f"}, "auth.jwt.issuer is required"),
        ({"jwks": "f", "issuer": "i"}, "auth.jwt.audience is required"),
        ({"algorithms": ("none",)}, "auth.jwt.algorithms is 'none'; known: RS256"),
        ({"algorithms": ("HS256",)}, "auth.jwt.algorithms is 'HS256'; known: RS256"),
        ({"jwks": "f", "issuer": "i", "audience": "a", "algorithms": ()}, "auth.jwt.algorithms is empty"),
    ],
)
def test_settings_that_would_admit_any_client_are_refused(settings: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        JwtConfig(**settings)


def test_asking_without_anything_to_check_against_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"auth.admin is true, but no client can authenticate; set auth.api_keys or auth.jwt.jwks"
    ):
        AuthConfig(admin=True)
