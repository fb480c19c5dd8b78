"""The pages that may call a listener."""

import re

import pytest

from penstock_common.config.allowed_hosts import AllowedOrigins
from penstock_common.errors import ConfigError


def test_origins_are_listed_one_by_one_or_by_scheme() -> None:
    origins = AllowedOrigins(("https://page.example", "chrome-extension://*", "app://.", "null"))
    for origin in ("https://page.example", "chrome-extension://abc", "app://.", "null"):
        assert origin in origins, origin
    for origin in (
        "http://page.example",
        "https://page.example:8443",
        "https://page.example.evil",
        "moz-extension://a",
        "",
    ):
        assert origin not in origins, origin


def test_the_pattern_is_for_the_middleware_of_cors() -> None:
    origins = AllowedOrigins(("https://page.example", "app://*", "chrome-extension://*"))
    assert origins.exact == ("https://page.example",)
    assert origins.pattern is not None
    assert re.fullmatch(origins.pattern, "chrome-extension://abc")
    assert not re.fullmatch(origins.pattern, "https://chrome-extension://abc")
    assert AllowedOrigins(("*",)).pattern is None


@pytest.mark.parametrize("origin", ["https://page.example", "null", "app://x"])
def test_a_star_allows_any(origin: str) -> None:
    assert origin in AllowedOrigins(("*",))


@pytest.mark.parametrize(
    "entry", ["https://page.example/", "page.example", "https://Page.example", "https://*.example", ""]
)
def test_another_entry_is_refused(entry: str) -> None:
    with pytest.raises(ConfigError, match=r"http\.allowed_origins: .* must be an origin in lower case without a path"):
        AllowedOrigins((entry,))
