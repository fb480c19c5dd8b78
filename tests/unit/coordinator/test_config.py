import pytest

from penstock_common.config import fields, load
from penstock_common.errors import ConfigError
from penstock_coordinator.config import CoordinatorConfig


def test_defaults():
    config = CoordinatorConfig()
    assert (config.server.port, config.lease_seconds, config.view_interval, config.wedged_after) == (50050, 5, 0.1, 30)


def test_the_first_view_waits_for_one_lease_unless_told_otherwise():
    assert CoordinatorConfig(lease_seconds=3.0).first_view_after == 3.0
    assert CoordinatorConfig(restart_grace=0.0).first_view_after == 0.0


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("lease_seconds", "0"),
        ("lease_seconds", "nan"),
        ("view_interval", "0"),
        ("wedged_after", "-1"),
        ("restart_grace", "-1"),
        ("server.port", "65536"),
        ("metrics.port", "-2"),
        ("log.level", "loud"),
    ],
)
def test_a_wrong_value_is_refused_by_name(key, value):
    with pytest.raises(ConfigError, match=key):
        load(CoordinatorConfig, overrides={key: value}, environ={})


def test_an_unknown_key_names_the_nearest(tmp_path):
    file = tmp_path / "coordinator.yaml"
    file.write_text("lease_second: 3\n")
    with pytest.raises(ConfigError, match=r"'lease_second'; did you mean 'lease_seconds'"):
        load(CoordinatorConfig, file=file, environ={})


def test_every_field_can_be_set_from_the_environment():
    assert dict(fields(CoordinatorConfig)).keys() >= {"lease_seconds", "restart_grace", "server.port", "log.format"}
    assert load(CoordinatorConfig, environ={"PENSTOCK_LEASE_SECONDS": "7"}).lease_seconds == 7.0
