"""Quotes of clients' values in errors."""

import pytest

from penstock_common.errors import LONGEST_QUOTE, excerpt, quoted


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("low", "'low'"),
        (3, "3"),
        (["a"], "['a']"),
        ("data:image/png;base64,c2VjcmV0", "'data:...'"),
        (" DATA:image/png;base64,c2VjcmV0", "'DATA:...'"),
        ("https://user:secret@host/?key=secret", "'https://...'"),
        ("host:50051", "'host:50051'"),
        ("a: b", "'a: b'"),
    ],
)
def test_a_value_is_quoted_and_of_a_url_only_the_scheme(value: object, shown: str) -> None:
    assert quoted(value) == shown


@pytest.mark.parametrize("value", ["x" * 10_000, 10**200, ["x"] * 1000])
def test_a_long_value_is_cut(value: object) -> None:
    assert len(quoted(value)) <= LONGEST_QUOTE + len("''...")
    assert quoted(value).endswith("...")


def test_an_excerpt_of_a_short_text_is_the_text() -> None:
    assert excerpt("abc", 3) == "abc"
    assert excerpt("abcd", 3) == "abc..."
