"""The file of API keys: the format of a line, and refusals that show no key."""

import hashlib
from pathlib import Path

import pytest

from penstock_common.errors import ConfigError
from penstock_frontend.authenticator import ApiKeys
from penstock_frontend.call_types import Principal

KEY = "sk-secret-0123456789"


def keys(tmp_path: Path, text: str) -> ApiKeys:
    (tmp_path / "keys").write_text(text)
    return ApiKeys(str(tmp_path / "keys"), field="auth.api_keys")


def test_a_line_says_whose_the_key_is_and_what_for(tmp_path: Path) -> None:
    digest = hashlib.sha256(b"another-secret-0123456789").hexdigest()
    found = keys(
        tmp_path, f"{KEY}\n\n# {KEY}x\nsha256:{digest.upper()} name=bob tenant=acme scopes=inference,admin # more\n"
    )
    assert found.find(KEY) == Principal(name="key in line 1")
    both = frozenset({"inference", "admin"})
    assert found.find("another-secret-0123456789") == Principal(name="bob", tenant="acme", scopes=both)
    for wrong in (f"{KEY}x", "", digest, f"sha256:{digest}", "b\udcff"):
        assert found.find(wrong) is None


def test_an_asterisk_speaks_for_every_tenant(tmp_path: Path) -> None:
    assert keys(tmp_path, f"{KEY} tenant=*").find(KEY) == Principal(name="key in line 1", any_tenant=True)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "has no key"),
        ("# only a comment\n", "has no key"),
        ("short\n", "line 1: the key has 5 characters; it must have at least 16"),
        (f"{KEY}\n{KEY}\n", "line 2: the key is already in line 1"),
        (f"{KEY}\nsha256:{hashlib.sha256(KEY.encode()).hexdigest()}\n", "line 2: the key is already in line 1"),
        ("sha256:1234\n", "line 1: the key begins with 'sha256:'; 64 hexadecimal digits must follow"),
        (f"name=alice {KEY}\n", "line 1: the key must be the first word of the line"),
        (f"{KEY} alice\n", "line 1: after the key, a line may have only name=, tenant= and scopes="),
        (f"{KEY} tenants=acme\n", "a line may have only name=, tenant= and scopes="),
        (f"{KEY} scopes=root\n", "scopes=root; known: inference, admin"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_by_line_and_without_its_keys(
    text: str, why: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"auth.api_keys: .*keys") as error:
        keys(tmp_path, text)
    assert why in str(error.value)
    assert KEY not in str(error.value)
