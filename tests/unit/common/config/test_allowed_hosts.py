"""The names under which a listener may be called."""

import pytest

from penstock_common.config.allowed_hosts import AllowedHosts, canonical_host
from penstock_common.config.sections import MetricsConfig
from penstock_common.errors import ConfigError

FIELD = "http.allowed_hosts"


@pytest.mark.parametrize(
    ("host", "canonical"),
    [
        ("LocalHost", "localhost"),
        ("localhost.", "localhost"),
        ("[::1]", "::1"),
        ("[0:0:0:0:0:0:0:1]", "::1"),
        ("[::ffff:127.0.0.1]", "127.0.0.1"),
        ("LLM.example.org.", "llm.example.org"),
        ("", ""),
    ],
)
def test_a_host_has_one_form(host: str, canonical: str) -> None:
    assert canonical_host(host) == canonical


@pytest.mark.parametrize("host", ["localhost", "a.localhost", "127.0.0.1", "127.8.9.10", "::1", "llm.lan"])
def test_loopback_names_and_the_bound_host_are_always_allowed(host: str) -> None:
    assert host in AllowedHosts((), field=FIELD, bound="llm.lan")
    assert host in AllowedHosts(("other.example",), field=FIELD, bound="llm.lan")


@pytest.mark.parametrize(
    "host", ["evil.example", "", "localhost.evil.example", "notlocalhost", "127.0.0.1.evil.example", "128.0.0.1", "::2"]
)
def test_other_hosts_are_not(host: str) -> None:
    assert host not in AllowedHosts((), field=FIELD, bound="127.0.0.1")


def test_entries_are_names_their_subdomains_addresses_and_networks() -> None:
    hosts = AllowedHosts(
        ("llm.example.org", "*.example.net", "10.0.0.0/8", "192.168.1.7", "[fd00::7]", "fd01::/64"), field=FIELD
    )
    for host in (
        "llm.example.org",
        "a.example.net",
        "a.b.example.net",
        "10.1.2.3",
        "192.168.1.7",
        "fd00::7",
        "fd01::9",
    ):
        assert host in hosts, host
    for host in (
        "example.org",
        "a.llm.example.org",
        "example.net",
        "evilexample.net",
        "11.1.2.3",
        "192.168.1.8",
        "fd00::8",
    ):
        assert host not in hosts, host


def test_a_star_allows_any() -> None:
    assert "evil.example" in AllowedHosts(("*",), field=FIELD)


@pytest.mark.parametrize(
    "entry", ["LLM.example.org", "llm.example.org:8000", "http://llm", "*.", "a.*.b", "10.0.0.1/8", "127.1", "", "a b"]
)
def test_another_entry_is_refused(entry: str) -> None:
    with pytest.raises(ConfigError, match=r"metrics\.allowed_hosts: .* must be a host in lower case without a port"):
        MetricsConfig(allowed_hosts=(entry,))
