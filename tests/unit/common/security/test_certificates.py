"""End of validity of certificates, as a service exports it for the certificates that it uses."""

import time
from pathlib import Path

import pytest
from cryptography import x509
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from penstock_common.config.sections import ClientTlsConfig, MetricsConfig, ServerConfig
from penstock_common.metrics_server import MetricsServer
from penstock_common.rpc.credentials import ClientCredentials
from penstock_common.rpc.server import RpcServer
from penstock_common.security.tls import Certificates
from tests.fakes.network.certificates import Authority, Files, replace

METRIC = "penstock:certificate_expiry_timestamp_seconds"


@pytest.fixture
def authority() -> Authority:
    return Authority(days=90)


@pytest.fixture
def files(authority: Authority, tmp_path: Path) -> Files:
    return authority.issue("server", days=30).write(tmp_path / "server")


@pytest.fixture
def certificates() -> Certificates:
    return Certificates()


def told(certificates: Certificates) -> dict[str, float]:
    registry = CollectorRegistry()
    registry.register(certificates)
    return {
        sample.labels["field"]: sample.value
        for family in registry.collect()
        for sample in family.samples
        if sample.name == METRIC
    }


def end(pem: bytes) -> float:
    return x509.load_pem_x509_certificate(pem).not_valid_after_utc.timestamp()


def days_left(seconds: float) -> int:
    return round((seconds - time.time()) / 86_400)


def test_without_tls_there_is_no_series(certificates: Certificates) -> None:
    ClientCredentials(ClientTlsConfig(), field="coordinator.tls", certificates=certificates)
    assert told(certificates) == {}


def test_a_connection_has_a_series_for_its_certificate_and_one_for_its_authorities(
    certificates: Certificates, files: Files
) -> None:
    ClientCredentials(files.client(), field="coordinator.tls", certificates=certificates)
    assert {field: days_left(seconds) for field, seconds in told(certificates).items()} == {
        "coordinator.tls.certificate": 30,
        "coordinator.tls.ca": 90,
    }


async def test_so_has_every_listener(certificates: Certificates, files: Files) -> None:
    rpc = RpcServer(
        ServerConfig(host="127.0.0.1", tls=files.server()), service_names=[], field="admin", certificates=certificates
    )
    await rpc.start()
    alone = MetricsConfig(host="127.0.0.1", port=0, tls=files.server(mutual=False))
    metrics = MetricsServer(alone, CollectorRegistry(), certificates)
    metrics.stop()
    await rpc.stop(0)
    assert told(certificates).keys() == {"admin.tls.certificate", "admin.tls.ca", "metrics.tls.certificate"}


def test_a_chain_expires_with_its_first_certificate_and_a_bundle_with_its_last(
    certificates: Certificates, authority: Authority, files: Files
) -> None:
    intermediate, other = Authority(days=7), Authority(days=365)
    leaf = Path(files.certificate).read_bytes()
    replace(Path(files.certificate), leaf + intermediate.ca)
    replace(Path(files.ca), authority.ca + other.ca)
    ClientCredentials(files.client(), field="engine_tls", certificates=certificates)
    assert told(certificates) == {"engine_tls.certificate": end(intermediate.ca), "engine_tls.ca": end(other.ca)}


def test_a_renewed_certificate_counts_at_once_and_one_that_cannot_be_used_does_not(
    certificates: Certificates, authority: Authority, files: Files, tmp_path: Path
) -> None:
    ClientCredentials(files.client(), field="coordinator.tls", certificates=certificates)
    renewed = authority.issue("server", days=60)
    renewed.write(tmp_path / "server")
    assert told(certificates)["coordinator.tls.certificate"] == end(renewed.certificate)
    # The key still belongs to the other certificate.
    replace(Path(files.certificate), authority.issue("server", days=80).certificate)
    with capture_logs() as logs:
        assert told(certificates)["coordinator.tls.certificate"] == end(renewed.certificate)
    assert "the changed file cannot be used" in logs[0]["event"]
