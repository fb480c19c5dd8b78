import ipaddress

import pytest

from penstock_common.errors import ConfigError, PermissionDenied, RequestFailed
from penstock_frontend.config import MediaConfig
from penstock_frontend.processing.media.sources import check_domain, is_allowed_address, read_url


@pytest.mark.parametrize(
    ("url", "host", "port", "path"),
    [
        ("https://Example.ORG", "example.org", 443, "/"),
        ("http://example.org/a%20b?c=d&e=f#part", "example.org", 80, "/a%20b?c=d&e=f"),
        ("https://example.org:8443/\u00e9", "example.org", 8443, "/%C3%A9"),
        ("https://93.184.216.34/x", "93.184.216.34", 443, "/x"),
        ("https://[2606:4700::1111]:8443/x", "2606:4700::1111", 8443, "/x"),
        ("http://sub_domain.xn--bcher-kva.example/", "sub_domain.xn--bcher-kva.example", 80, "/"),
    ],
)
def test_a_url_says_whom_to_ask_for_what(url: str, host: str, port: int, path: str) -> None:
    target = read_url(url, field="url")
    assert (target.host, target.port, target.path) == (host, port, path)


def test_the_header_host_has_the_port_where_it_is_not_the_schemes_own() -> None:
    assert read_url("https://example.org:443/", field="url").authority == "example.org"
    assert read_url("http://example.org:443/", field="url").authority == "example.org:443"
    assert read_url("https://[2606:4700::1111]:1/", field="url").authority == "[2606:4700::1111]:1"


@pytest.mark.parametrize(
    "url",
    [
        "file:///etc/passwd",
        "ftp://example.org/a",
        "gopher://example.org/",
        "//example.org/a.png",
        "/etc/passwd",
        "http://",
        "http:///a",
        "http://user:secret@example.org/",
        "http://example.org@127.0.0.1/",
        "http://127.0.0.1\\@example.org/",
        "http://exa mple.org/",
        "http://example.org\t/",
        "http://example.org/\r\nHost: internal",
        "http://example.org:0/",
        "http://example.org:99999/",
        "http://example.org:x/",
        "http://example..org/",
        "http://.example.org/",
        "http://example.org./",
        "http://-example.org/",
        "http://ex%61mple.org/",
        "http://example\u3002org/",
        "http://\u24d4xample.org/",
        "http://2130706433/",
        "http://017700000001/",
        "http://0x7f000001/",
        "http://0x7f.1/",
        "http://127.1/",
        "http://127.0.0.01/",
        "http://0177.0.0.1/",
        "http://127.0.0.1./",
        "http://1.2.3.4.5/",
        "http://256.1.1.1/",
        "http://[::1%25eth0]/",
        "http://[::1%eth0]/",
        "http://[127.0.0.1]/",
        "http://[::1/",
        "http://[::1]x/",
        "http://example.org/" + "a" * 9000,
    ],
    ids=lambda url: url[:40],
)
def test_a_url_that_may_be_read_in_two_ways_is_refused(url: str) -> None:
    with pytest.raises(RequestFailed) as error:
        read_url(url, field="messages[0].content[1]")
    assert error.value.reason in ("MEDIA_NOT_ALLOWED", "MEDIA_UNREADABLE", "MEDIA_TOO_LARGE")
    assert error.value.field == "messages[0].content[1]"
    assert not any(part in error.value.message for part in ("secret", "passwd", "aaaa"))


@pytest.mark.parametrize(
    ("allowed", "url", "fits"),
    [
        ("example.org", "https://example.org/", True),
        ("example.org", "http://example.org/", True),
        ("example.org", "https://example.org:8443/", False),
        ("example.org", "http://example.org:443/", False),
        ("example.org", "https://images.example.org/", False),
        ("example.org", "https://badexample.org/", False),
        ("example.org", "https://example.org.bad.net/", False),
        ("example.org:8443", "https://example.org:8443/", True),
        ("example.org:8443", "https://example.org/", False),
        ("*.example.org", "https://images.example.org/", True),
        ("*.example.org", "https://a.b.example.org/", True),
        ("*.example.org", "https://example.org/", False),
        ("*.example.org", "https://badexample.org/", False),
        ("*.example.org:81", "http://a.example.org:81/", True),
        ("*", "https://anything.net/", True),
        ("*", "https://anything.net:8443/", False),
        ("*:8443", "https://anything.net:8443/", True),
        ("93.184.216.34", "https://93.184.216.34/", True),
        ("93.184.216.34", "https://93.184.216.35/", False),
        ("[2606:4700::1111]", "https://[2606:4700:0:0::1111]/", True),
        ("[2606:4700::1111]:8443", "https://[2606:4700::1111]:8443/", True),
        ("*.34", "https://93.184.216.34/", False),
    ],
)
def test_a_domain_allows_a_host_and_a_port(allowed: str, url: str, fits: bool) -> None:
    target = read_url(url, field="url")
    if fits:
        check_domain(target, [allowed], field="url")
    else:
        with pytest.raises(PermissionDenied) as error:
            check_domain(target, [allowed], field="url")
        assert error.value.reason == "MEDIA_NOT_ALLOWED"


def test_without_domains_no_url_is_fetched() -> None:
    with pytest.raises(PermissionDenied, match="media.allowed_domains is empty"):
        check_domain(read_url("https://example.org/", field="url"), [], field="url")


@pytest.mark.parametrize(
    "domain",
    ["Example.org", "https://example.org", "example.org/", "*example.org", "a.*.org", "", "x:0", "x:65536", "user@x"],
)
def test_a_domain_that_is_written_wrong_is_refused(domain: str) -> None:
    with pytest.raises(ConfigError, match="media.allowed_domains"):
        MediaConfig(allowed_domains=(domain,))


def test_a_private_network_that_is_written_wrong_is_refused() -> None:
    with pytest.raises(ConfigError, match="media.allowed_private_networks"):
        MediaConfig(allowed_private_networks=("10.0.0.1/8",))


PRIVATE = [
    "0.0.0.0",
    "0.1.2.3",
    "10.0.0.1",
    "100.64.0.1",
    "100.127.255.255",
    "127.0.0.1",
    "127.255.255.254",
    "169.254.169.254",
    "172.16.0.1",
    "172.31.255.255",
    "192.0.0.8",
    "192.0.2.1",
    "192.88.99.1",
    "192.168.1.1",
    "198.18.0.1",
    "198.19.255.255",
    "198.51.100.1",
    "203.0.113.1",
    "224.0.0.1",
    "239.255.255.255",
    "240.0.0.1",
    "255.255.255.255",
    "::",
    "::1",
    "::7f00:1",
    "::ffff:127.0.0.1",
    "::ffff:93.184.216.34",
    "64:ff9b::7f00:1",
    "64:ff9b::5db8:d822",
    "64:ff9b:1::1",
    "100::1",
    "2001::1",
    "2001:db8::1",
    "2002:7f00:1::1",
    "2002:5db8:d822::1",
    "3fff::1",
    "5f00::1",
    "fc00::1",
    "fd12:3456::1",
    "fe80::1",
    "fe80::1%eth0",
    "fec0::1",
    "ff02::1",
    "2606:4700::1111%eth0",
    "no address",
    "",
]


@pytest.mark.parametrize("address", PRIVATE)
def test_an_address_that_is_not_public_is_not_dialled(address: str) -> None:
    assert not is_allowed_address(address, [])


@pytest.mark.parametrize(
    "address", ["1.1.1.1", "93.184.216.34", "172.32.0.1", "100.128.0.1", "2606:4700::1111", "2a00:1450::1"]
)
def test_a_public_address_is_dialled(address: str) -> None:
    assert is_allowed_address(address, [])


def test_a_private_address_is_dialled_where_its_network_is_named() -> None:
    networks = [ipaddress.ip_network("10.1.0.0/16"), ipaddress.ip_network("fd00::/8")]
    assert is_allowed_address("10.1.2.3", networks)
    assert is_allowed_address("fd00::1", networks)
    assert not is_allowed_address("10.2.0.1", networks)
    assert not is_allowed_address("::ffff:10.1.2.3", networks)
