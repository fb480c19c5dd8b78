"""Certificates and keys that cannot be used are refused at the start, by field and path."""

import asyncio
import itertools
import ssl
import urllib.request
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from penstock_common.addresses import warn_of_plaintext
from penstock_common.config.sections import ClientTlsConfig, MetricsConfig, ServerConfig, TlsConfig
from penstock_common.errors import ConfigError
from penstock_common.metrics_server import MetricsServer
from penstock_common.rpc.channel import make_channel
from penstock_common.rpc.credentials import ClientCredentials, advised, is_of_tls
from penstock_common.rpc.server import RpcServer
from penstock_common.security.tls import Certificates, ExpiryWarnings, read_material
from tests.fakes.network.certificates import Authority, Files
from tests.fakes.patience import PATIENCE


@pytest.fixture
def authority() -> Authority:
    return Authority()


@pytest.fixture
def files(authority: Authority, tmp_path: Path) -> Files:
    return authority.issue("server").write(tmp_path / "server")


def refused(config: TlsConfig | ClientTlsConfig) -> str:
    with pytest.raises(ConfigError) as error:
        read_material(config, field="server.tls")
    return str(error.value)


def test_good_files_are_read(files: Files) -> None:
    material = read_material(files.server(), field="server.tls")
    assert b"CERTIFICATE" in material.certificate
    assert b"PRIVATE KEY" in material.key


@pytest.mark.parametrize("field", ["certificate", "key", "ca"])
@pytest.mark.parametrize("how", ["missing", "empty", "garbage", "a folder"])
def test_files_that_cannot_be_used_are_named(field: str, how: str, files: Files) -> None:
    path = Path(getattr(files, field))
    path.unlink()
    if how == "a folder":
        path.mkdir()
    elif how != "missing":
        path.write_bytes(b"" if how == "empty" else b"-----BEGIN CERTIFICATE-----\nsecret stuff\n")
    message = refused(files.server())
    assert f"server.tls.{field}: {path}" in message
    assert "secret stuff" not in message


def test_a_certificate_whose_time_is_over_or_to_come_is_refused(authority: Authority, tmp_path: Path) -> None:
    old = authority.issue("server", expired=True).write(tmp_path / "old")
    early = authority.issue("server", early=True).write(tmp_path / "early")
    assert f"server.tls.certificate: {old.certificate}: the certificate expired at 20" in refused(old.server())
    assert f"server.tls.certificate: {early.certificate}: the certificate is not valid before" in refused(
        early.server()
    )


def test_a_key_of_another_certificate_is_refused(authority: Authority, files: Files) -> None:
    Path(files.key).write_bytes(authority.issue("other").key)
    assert refused(files.server()) == (
        f"server.tls.key: {files.key}: the key does not belong to the certificate in {files.certificate}"
    )


@pytest.mark.parametrize(
    ("config", "values", "message"),
    [
        (TlsConfig, {"certificate": "c"}, "tls.certificate is set, but tls.key is empty"),
        (TlsConfig, {"key": "k"}, "tls.key is set, but tls.certificate is empty"),
        (TlsConfig, {"ca": "ca"}, "tls.ca is 'ca', but tls.certificate is empty; set tls.certificate"),
        (ClientTlsConfig, {"certificate": "c", "key": "k"}, "tls.ca is required"),
        (ClientTlsConfig, {"server_name": "s"}, "tls.ca is required"),
        (ClientTlsConfig, {"ca": "ca", "certificate": "c"}, "tls.certificate is set, but tls.key is empty"),
    ],
)
def test_settings_that_need_one_another_say_so(config: type, values: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config(**values)


async def test_a_server_does_not_start_with_a_bad_certificate(files: Files) -> None:
    Path(files.certificate).write_bytes(b"")  # noqa: ASYNC240 - a test has nothing else to do meanwhile
    server = RpcServer(ServerConfig(host="127.0.0.1", tls=files.server()), service_names=[])
    with pytest.raises(ConfigError, match=r"server.tls.certificate: .*tls.crt"):
        await server.start()
    await server.stop(0)


def test_a_client_that_cannot_read_its_files_does_not_start(files: Files) -> None:
    Path(files.ca).unlink()
    with pytest.raises(ConfigError, match=r"engine_tls.ca: .*ca.crt"):
        ClientCredentials(files.client(), field="engine_tls")


async def test_a_listener_beyond_loopback_without_tls_says_so_once_at_its_start(
    capsys: pytest.CaptureFixture[str], files: Files
) -> None:
    async def log_of(config: ServerConfig) -> str:
        server = RpcServer(config, service_names=[])
        await server.start()
        await server.stop(0)
        captured = capsys.readouterr()
        return captured.out + captured.err

    assert (await log_of(ServerConfig(host="0.0.0.0"))).count("server listens without TLS") == 1
    assert "without TLS" not in await log_of(ServerConfig(host="127.0.0.1"))
    assert "without TLS" not in await log_of(ServerConfig(host="0.0.0.0", tls=files.server()))


def test_a_listener_that_is_read_alone_does_not_warn_of_changes() -> None:
    with capture_logs() as logs:
        warn_of_plaintext("192.0.2.1", field="metrics", reads=True)
        warn_of_plaintext("192.0.2.1", field="http")
    for_reading, for_all = [line["event"] for line in logs]
    assert "anyone who can reach 192.0.2.1 can read the data" in for_reading
    assert "can read, change and send the data" in for_all


def test_the_metrics_listener_is_read_alone() -> None:
    with capture_logs() as logs:
        MetricsServer(MetricsConfig(host="0.0.0.0", port=0), CollectorRegistry()).stop()
    [warning] = [line["event"] for line in logs if "without TLS" in line["event"]]
    assert "can read the data" in warning


async def test_health_is_served_without_tls_on_a_port_of_its_own(files: Files) -> None:
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    server = RpcServer(ServerConfig(host="127.0.0.1", health_port=0, tls=files.server()), service_names=["s"])
    await server.start()
    async with make_channel(f"127.0.0.1:{server.health_port}") as channel:
        status = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service="liveness"))
        assert status.status == health_pb2.HealthCheckResponse.SERVING
    await server.stop(0)


async def test_metrics_are_served_over_tls_while_a_silent_client_is_connected(
    authority: Authority, files: Files, tmp_path: Path
) -> None:
    server = MetricsServer(MetricsConfig(host="127.0.0.1", port=0, tls=files.server()), CollectorRegistry())
    assert server._server is not None
    port = server._server.server_port
    client = authority.issue("prometheus").write(tmp_path / "client")
    _, silent = await asyncio.open_connection("127.0.0.1", port)
    context = ssl.create_default_context(cafile=files.ca)

    def scrape() -> int:
        with urllib.request.urlopen(f"https://127.0.0.1:{port}/metrics", context=context, timeout=PATIENCE) as answer:
            return answer.status

    with pytest.raises(OSError, match=r"certificate required|closed|reset|EOF"):
        await asyncio.to_thread(scrape)
    context.load_cert_chain(client.certificate, client.key)
    assert await asyncio.to_thread(scrape) == 200
    silent.close()
    await asyncio.to_thread(server.stop)


def test_what_a_failed_handshake_means_is_said() -> None:
    assert "no authority in tls.ca has issued" in advised(
        "SSL routines: CERTIFICATE_VERIFY_FAILED: unable to get local issuer"
    )
    assert "has expired" in advised("CERTIFICATE_VERIFY_FAILED: certificate has expired")
    assert "does not use TLS" in advised("SSL routines:OPENSSL_internal:WRONG_VERSION_NUMBER")
    assert advised("Connection refused") == "Connection refused"


# Times at which a service warns that its certificates expire.

DAY, HOUR = 86_400.0, 3600.0
END = 100 * DAY


def times(warnings: ExpiryWarnings, start: float, stop: float, step: float = 600.0) -> list[float]:
    """Return the times of warnings, in seconds before the certificate's end, if it is checked every ``step`` seconds."""
    found, now = [], END - start
    while now <= END - stop:
        if warnings.due({"server.tls.certificate": END}, now):
            found.append(END - now)
        now += step
    return found


def test_a_certificate_is_warned_of_once_in_two_weeks_then_hourly_in_the_last_day() -> None:
    warnings = ExpiryWarnings()
    assert times(warnings, 30 * DAY, 1.01 * DAY) == [14 * DAY]
    last_day = times(warnings, DAY, 600.0)
    assert len(last_day) == 24
    assert {a - b for a, b in itertools.pairwise(last_day)} == {HOUR}


def test_it_is_warned_of_at_its_end_and_behind_it() -> None:
    warnings = ExpiryWarnings()
    assert times(warnings, 1200.0, 600.0) == [1200.0]
    assert times(warnings, 0.0, -2 * HOUR) == [0.0, -HOUR, -2 * HOUR]


def test_one_that_ends_soon_at_the_start_is_warned_of_at_once_and_a_renewed_one_anew() -> None:
    warnings = ExpiryWarnings()
    assert warnings.due({"a": END, "b": 2 * END}, END - 3 * DAY) == ["a"]
    assert warnings.due({"a": END + DAY, "b": 2 * END}, END - 3 * DAY) == ["a"]
    assert warnings.due({"a": END + 50 * DAY}, END - 3 * DAY) == []


def test_handshakes_with_an_ended_certificate_are_warned_of_once_a_minute() -> None:
    warnings = ExpiryWarnings()
    due = [second for second in range(-5, 180) if warnings.handshake_is_due("server.tls", END, END + second)]
    assert due == [0, 60, 120]


@pytest.mark.parametrize(("days", "events"), [(3, ["certificate expires soon"]), (30, [])])
def test_the_log_says_so_when_a_hop_is_made(days: int, events: list[str], tmp_path: Path) -> None:
    files = Authority(days=90).issue("server", days=days).write(tmp_path / "server")
    with capture_logs() as logs:
        ClientCredentials(files.client(), field="coordinator.tls", certificates=Certificates())
    assert [log["event"] for log in logs] == events
    assert all(log["field"] == "coordinator.tls.certificate" and 71 <= log["hours_left"] <= 72 for log in logs)


def test_the_log_says_so_at_handshakes() -> None:
    certificates = Certificates()
    with capture_logs() as logs:
        for _ in range(3):
            certificates.handshake("http.tls", {"certificate": 1000.0})
        certificates.handshake("server.tls", {"certificate": 1e12})
    assert [(log["event"], log["field"], log["ended"]) for log in logs] == [
        (
            "a client started a TLS handshake, but this service's certificate has expired",
            "http.tls.certificate",
            "1970-01-01 00:16 UTC",
        )
    ]
    ClientCredentials(ClientTlsConfig(), field="x", certificates=certificates)


def test_failures_of_tls_are_known() -> None:
    assert is_of_tls("Ssl handshake failed: CERTIFICATE_VERIFY_FAILED: certificate has expired: OK")
    assert not is_of_tls("failed to connect to all addresses: connection refused")
