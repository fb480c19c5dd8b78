"""`/metrics` of a service without an HTTP API of its own, while other clients misbehave."""

import errno
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from wsgiref.simple_server import WSGIServer

import pytest
from prometheus_client import CollectorRegistry, Counter

from penstock_common import metrics_server
from penstock_common.config.sections import MetricsConfig, TlsConfig
from penstock_common.metrics_server import MAX_CONNECTIONS, MetricsServer
from tests.fakes.network.certificates import Authority
from tests.fakes.network.ports import free_port
from tests.fakes.patience import PATIENCE


@contextmanager
def serving(
    tls: TlsConfig | None = None, *, host: str = "127.0.0.1", allowed_hosts: tuple[str, ...] = ()
) -> Iterator[int]:
    registry = CollectorRegistry()
    Counter("answered", "Answered questions", registry=registry)
    config = MetricsConfig(host=host, port=(port := free_port()), allowed_hosts=allowed_hosts, tls=tls or TlsConfig())
    server = MetricsServer(config, registry)
    yield port
    server.stop()


@pytest.fixture
def port() -> Iterator[int]:
    with serving() as port:
        yield port


def scrape(port: int) -> bytes:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=PATIENCE) as answer:
        body: bytes = answer.read()
    return body


def status(port: int, **headers: str) -> tuple[int, str]:
    """Return the status and the body of a scrape with these headers."""
    url = f"http://127.0.0.1:{port}/metrics"
    sent = {name.replace("_", "-"): value for name, value in headers.items()}
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=sent), timeout=PATIENCE) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as e:
        return e.code, e.read().decode()


@pytest.mark.parametrize(
    ("headers", "refused", "said"),
    [
        ({"Origin": "https://evil.example"}, 403, "Origin is 'https://evil.example', which is not this server's own"),
        ({"Sec_Fetch_Site": "cross-site"}, 403, "pages of other origins may not call this port"),
        ({"Host": "evil.example"}, 421, "Host is 'evil.example', which is not in metrics.allowed_hosts; add"),
    ],
)
def test_pages_of_browsers_do_not_read_metrics(port: int, headers: dict[str, str], refused: int, said: str) -> None:
    got, body = status(port, **headers)
    assert got == refused
    assert said in body
    assert "answered_total" not in body


@pytest.mark.parametrize(
    "headers", [{}, {"Host": "localhost:1"}, {"Sec_Fetch_Site": "none"}, {"Sec_Fetch_Site": "same-origin"}]
)
def test_scrapers_and_people_read_metrics(port: int, headers: dict[str, str]) -> None:
    got, body = status(port, **headers)
    assert got == 200
    assert "answered_total" in body


def test_an_external_listener_accepts_any_host_header_unless_hosts_are_listed() -> None:
    with serving(host="0.0.0.0") as port:
        assert status(port, Host="10.1.2.3:9090")[0] == 200
        assert status(port, Origin="https://evil.example", Host="10.1.2.3")[0] == 403
    with serving(host="0.0.0.0", allowed_hosts=("10.0.0.0/8",)) as port:
        assert status(port, Host="10.1.2.3:9090")[0] == 200
        assert status(port, Host="evil.example")[0] == 421


def test_silent_connections_are_limited_and_the_oldest_gives_way(port: int) -> None:
    with ExitStack() as stack:
        silent = [
            stack.enter_context(socket.create_connection(("127.0.0.1", port), PATIENCE)) for _ in range(MAX_CONNECTIONS)
        ]
        assert b"answered_total" in scrape(port)
        assert silent[0].recv(1) == b"", "the oldest was closed"
        threads = [thread for thread in threading.enumerate() if "process_request_thread" in thread.name]
        assert len(threads) <= MAX_CONNECTIONS + 1  # one more thread may be about to end


@pytest.mark.slow
def test_connections_that_shake_no_hands_are_limited_as_well(tmp_path: Path) -> None:
    files = Authority().issue("server").write(tmp_path / "server")
    with serving(files.server()) as port, ExitStack() as stack:
        silent = [
            stack.enter_context(socket.create_connection(("127.0.0.1", port), PATIENCE))
            for _ in range(MAX_CONNECTIONS + 1)
        ]
        assert silent[0].recv(1) == b"", "the oldest was closed"


def test_the_listener_pauses_where_the_system_has_no_room(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    failures = [errno.EMFILE, errno.ENFILE]
    pauses: list[float] = []
    accept = WSGIServer.get_request

    def without_room(server: WSGIServer) -> object:
        if failures:
            raise OSError(failures.pop(), "no room")
        return accept(server)

    monkeypatch.setattr(WSGIServer, "get_request", without_room)
    monkeypatch.setattr(time, "sleep", pauses.append)
    assert b"answered_total" in scrape(port)
    assert pauses == [metrics_server._PAUSE] * 2
