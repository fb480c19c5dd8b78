"""Browser calls that are refused because of their headers."""

from typing import Any

import pytest

from penstock_common.security.cross_site import caller_rules, refusal

HOST = "127.0.0.1:8000"
JSON = {"content-type": "application/json", "content-length": "2"}
NAVIGATION = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate", "sec-fetch-dest": "document"}


def status(
    method: str = "GET", *, config: dict[str, Any] | None = None, **headers: str | tuple[str, ...]
) -> int | None:
    """Return the status of the refusal, or None if the call is accepted. Underscores in names of headers stand for
    dashes.
    """
    listed = {"host": HOST, **{name.replace("_", "-"): value for name, value in headers.items()}}
    sent = [
        (name.encode(), each.encode("latin-1"))
        for name, values in listed.items()
        for each in ((values,) if isinstance(values, str) else values)
    ]
    settings = {"host": "127.0.0.1", "allowed_hosts": (), "allowed_origins": (), **(config or {})}
    error = refusal(method, sent, caller_rules("http", **settings))
    return None if error is None else error.status


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1:8000",
        "127.0.0.1",
        "LOCALHOST:8000",
        "localhost.:8000",
        "llm.localhost",
        "[::1]:8000",
        "[::FFFF:127.0.0.1]",
        "localhost:",
        "127.3.4.5:1",
    ],
)
def test_a_loopback_listener_is_called_by_the_names_of_loopback(host: str) -> None:
    assert status(host=host) is None


@pytest.mark.parametrize(
    "host",
    [
        "evil.example:8000",
        "evil.example",
        "EVIL.example.",
        "localhost.evil.example",
        "10.0.0.1:8000",
        "[fd00::1]:8000",
        "",
        "::1",
        "[::1",
        "[::1]evil",
        "user@localhost",
        "localhost:8000:1",
        "localhost/evil",
        "local host",
        "évil",
        "0.0.0.0",
    ],
)
def test_and_by_no_other(host: str) -> None:
    assert status(host=host) == 421


@pytest.mark.parametrize("bound", ["localhost", "::1", "[::1]", "127.0.0.9"])
def test_every_listener_on_loopback_is_guarded(bound: str) -> None:
    assert status(config={"host": bound}, host="evil.example") == 421


@pytest.mark.parametrize("host", ["10.42.0.7:8000", "llm.example.org", "anything", ""])
@pytest.mark.parametrize("bound", ["0.0.0.0", "::"])
def test_elsewhere_any_host_is_served_unless_hosts_are_listed(bound: str, host: str) -> None:
    assert status(config={"host": bound}, host=host) is None
    assert status(config={"host": bound, "allowed_hosts": ("*",)}, host=host) is None
    assert status(config={"host": bound, "allowed_hosts": ("other.example",)}, host=host) == 421


def test_a_list_of_hosts_holds_on_every_listener() -> None:
    listed = {"host": "0.0.0.0", "allowed_hosts": ("llm.example.org", "*.example.net", "10.0.0.0/8")}
    for host in ("llm.example.org", "LLM.example.org.:443", "a.example.net:1", "10.42.0.7:8000", "localhost:8000"):
        assert status(config=listed, host=host) is None, host
    assert status(config={"allowed_hosts": ("*",)}, host="evil.example") is None


def test_a_call_without_a_host_is_no_browsers_and_one_with_two_is_malformed() -> None:
    assert status(host=()) is None
    assert status(host=(HOST, HOST)) == 400
    assert status(host=(HOST, "evil.example"), config={"host": "0.0.0.0"}) == 400


@pytest.mark.parametrize(
    "origin",
    [
        "http://evil.example",
        "http://evil.example:8000",
        "null",
        "",
        "file://",
        "app://.",
        "chrome-extension://abc",
        "http://127.0.0.1",
        "http://127.0.0.1:8001",
        "http://localhost:8000",
        "ftp://127.0.0.1:8000",
        "127.0.0.1:8000",
        "http://127.0.0.1:8000 http://evil.example",
        "http://127.0.0.1:8000@evil.example",
        "http://127.0.0.1:8000/",
    ],
)
@pytest.mark.parametrize("method", ["GET", "POST", "DELETE", "OPTIONS"])
def test_other_origins_are_refused_whatever_they_call(method: str, origin: str) -> None:
    assert status(method, origin=origin, **JSON) == 403


def test_several_origins_are_none() -> None:
    assert status("POST", origin=("http://127.0.0.1:8000", "http://127.0.0.1:8000"), **JSON) == 403


@pytest.mark.parametrize(
    ("origin", "host"),
    [
        ("http://127.0.0.1:8000", "127.0.0.1:8000"),
        ("http://localhost:8000", "LOCALHOST:8000"),
        ("http://[::1]:8000", "[::1]:8000"),
        ("http://localhost", "localhost"),
        ("http://localhost", "localhost:80"),
        ("https://localhost", "localhost:443"),
        ("https://localhost", "localhost"),  # a proxy in front of the server terminates TLS
        ("https://localhost:8443", "localhost:8443"),
    ],
)
def test_the_servers_own_pages_may_call(origin: str, host: str) -> None:
    assert status("POST", origin=origin, host=host, **JSON) is None
    assert status(origin=origin, host=host) is None


@pytest.mark.parametrize(
    ("origin", "host"),
    [
        ("http://localhost", "localhost:8000"),
        ("https://localhost", "localhost:80"),
        ("http://localhost:8000", "localhost"),
    ],
)
def test_another_port_is_another_origin(origin: str, host: str) -> None:
    assert status("POST", origin=origin, host=host, **JSON) == 403


def test_what_the_browser_calls_its_own_is_its_own_though_a_proxy_changed_the_host() -> None:
    assert status("POST", origin="https://llm.example.org", sec_fetch_site="same-origin", **JSON) is None
    assert status("POST", origin="https://llm.example.org", sec_fetch_site="cross-site", **JSON) == 403


def test_a_rebound_name_is_its_own_origin_and_refused_for_its_host() -> None:
    call = {"origin": "http://evil.example:8000", "sec_fetch_site": "same-origin", "host": "evil.example:8000"}
    assert status("POST", **call, **JSON) == 421


def test_listed_origins_may_call() -> None:
    listed = {"allowed_origins": ("https://page.example", "vscode-webview://*", "null")}
    for origin in ("https://page.example", "vscode-webview://1ab", "null"):
        assert status("POST", config=listed, origin=origin, sec_fetch_site="cross-site", **JSON) is None, origin
    assert status("POST", config=listed, origin="http://evil.example", **JSON) == 403
    assert status("POST", config={"allowed_origins": ("*",)}, origin="http://evil.example", **JSON) is None


@pytest.mark.parametrize("site", ["cross-site", "same-site", "new-word"])
def test_without_an_origin_the_browser_tells_whose_call_it_is(site: str) -> None:
    assert status(sec_fetch_site=site, sec_fetch_mode="no-cors", sec_fetch_dest="image") == 403
    assert status(sec_fetch_site=site, sec_fetch_mode="navigate", sec_fetch_dest="iframe") == 403
    assert status(sec_fetch_site=site, config={"allowed_origins": ("https://page.example",)}) == 403
    assert status(sec_fetch_site=site, config={"allowed_origins": ("*",)}) is None


@pytest.mark.parametrize("site", ["none", "same-origin"])
def test_what_a_person_types_and_what_the_page_asks_is_served(site: str) -> None:
    assert status(sec_fetch_site=site) is None


def test_a_link_may_lead_to_the_page_but_not_send_anything() -> None:
    headers = {name.replace("-", "_"): value for name, value in NAVIGATION.items()}
    assert status(**headers) is None
    assert status("POST", **headers) == 403
    assert status("POST", **headers, origin="http://evil.example") == 403


@pytest.mark.parametrize(
    "kind",
    [
        "application/json",
        "Application/JSON; charset=utf-8",
        "application/vnd.x+json",
        "multipart/form-data; boundary=x",
    ],
)
def test_pages_send_json_and_forms(kind: str) -> None:
    assert status("POST", origin=f"http://{HOST}", content_type=kind, content_length="2") is None


@pytest.mark.parametrize(
    "kind",
    [
        (),
        "",
        "text/plain",
        "text/plain;charset=UTF-8",
        "text/plain; application/json",
        "application/x-www-form-urlencoded",
        "multipart/mixed; boundary=x",
        "application/jsonp",
        "+json",
        ("application/json", "text/plain"),
    ],
)
def test_and_nothing_else(kind: str | tuple[str, ...]) -> None:
    own, listed = {"origin": f"http://{HOST}"}, {"allowed_origins": ("*",)}
    assert status("POST", content_type=kind, content_length="2", **own) == 415
    assert status("POST", content_type=kind, transfer_encoding="chunked", **own) == 415
    assert status("POST", content_type=kind, content_length="2", origin="http://a.example", config=listed) == 415


def test_pages_of_other_origins_send_no_forms() -> None:
    """A browser sends a form without asking the server first, so the origin alone decides."""
    form = {"content_type": "multipart/form-data; boundary=x", "content_length": "2"}
    assert status("POST", origin="http://evil.example", **form) == 403
    assert status("POST", origin="null", **form) == 403
    assert status("POST", sec_fetch_site="cross-site", **form) == 403


def test_without_a_body_there_is_no_type_to_say() -> None:
    assert status("POST", origin=f"http://{HOST}", content_length="0") is None
    assert status("DELETE", origin=f"http://{HOST}") is None


@pytest.mark.parametrize("kind", [(), "text/plain", "application/x-www-form-urlencoded"])
def test_programs_may_send_json_as_anything(kind: str | tuple[str, ...]) -> None:
    assert status("POST", content_type=kind, content_length="2") is None


def test_messages_name_the_setting_and_quote_little() -> None:
    rules = caller_rules("http", "127.0.0.1", (), ())
    errors = [
        refusal("GET", [(b"host", b"e" * 10_000)], rules),
        refusal("GET", [(b"host", HOST.encode()), (b"origin", b"e" * 10_000)], rules),
    ]
    messages = [error.message for error in errors if error is not None]
    assert ["http.allowed_hosts" in messages[0], "http.allowed_origins" in messages[1]] == [True, True]
    assert all(len(message) < 600 for message in messages)


@pytest.mark.parametrize("headers", [{"origin": "https://page.example"}, {"sec_fetch_site": "cross-site"}])
def test_a_listener_without_pages_names_no_setting_for_them(headers: dict[str, str]) -> None:
    assert status(config={"allowed_origins": None}, **headers) == 403
    sent = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    refused = refusal("GET", sent, caller_rules("metrics", "0.0.0.0", ()))
    assert refused is not None
    assert refused.message.endswith("; pages of other origins may not call this port")
    assert refusal("GET", [(b"host", b"10.1.2.3:9090")], caller_rules("metrics", "0.0.0.0", ())) is None
