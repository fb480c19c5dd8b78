"""Meeting of nodes: if other hosts can reach the address, peers must know the secret."""

from pathlib import Path

import pytest

from penstock_common.errors import ConfigError
from penstock_enginecore.config import EngineCoreConfig, ModelConfig, ParallelConfig
from penstock_enginecore.executor.multiproc.nodes import meeting_place, secret_of


def config(secret_file: str = "") -> EngineCoreConfig:
    return EngineCoreConfig(model=ModelConfig(path="m"), parallel=ParallelConfig(secret_file=secret_file))


def test_on_loopback_no_secret_is_needed() -> None:
    assert secret_of(config(), "127.0.0.1") is None


@pytest.mark.parametrize("address", ["10.0.0.1", "fd00::1", "0.0.0.0"])
def test_where_other_hosts_reach_it_a_secret_is(address: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"executor\.nodes\.address is .* set parallel\.secret_file"):
        secret_of(config(), address)
    file = tmp_path / "secret"
    file.write_text("s" * 32)
    file.chmod(0o600)
    assert secret_of(config(str(file)), address) is not None


def test_a_file_without_a_secret_is_refused_on_loopback_too(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text("short")
    with pytest.raises(ConfigError, match=r"parallel\.secret_file: .* contains 5 bytes"):
        secret_of(config(str(file)), "127.0.0.1")


def test_an_address_of_another_host_is_named() -> None:
    with pytest.raises(ConfigError, match=r"cannot bind to executor\.nodes\.address '192\.0\.2\.1'"):
        meeting_place("192.0.2.1", None)
