import pytest

from penstock_common.config.loader import from_command_line, load
from penstock_common.config.settings import settings_of
from penstock_common.errors import ConfigError
from penstock_coordinator.config import CoordinatorConfig, KubernetesConfig
from penstock_frontend.config import FrontendConfig


def test_defaults():
    config = CoordinatorConfig()
    assert (config.server.port, config.lease_seconds, config.view_interval) == (50050, 5, 0.1)


def test_the_first_view_waits_for_one_lease_unless_told_otherwise():
    assert CoordinatorConfig(lease_seconds=3.0).first_view_after == 3.0
    assert CoordinatorConfig(restart_grace=0.0).first_view_after == 0.0


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("lease_seconds", "0"),
        ("lease_seconds", "nan"),
        ("view_interval", "0"),
        ("restart_grace", "-1"),
        ("server.port", "65536"),
        ("metrics.port", "-2"),
        ("log.level", "loud"),
        ("kubernetes.max_replicas", "0"),
        ("kubernetes.min_replicas", "{default: -1}"),
        ("kubernetes.min_replicas", "{default: 101}"),
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


INSTEAD = "it was removed; set wedged_after of the engines, which detect and report a wedged state themselves"


@pytest.mark.parametrize(
    ("config", "key"), [(CoordinatorConfig, "wedged_after"), (FrontendConfig, "detection.wedged_after")]
)
def test_the_clocks_that_engines_replaced_are_refused_with_what_is_there_instead(config, key, tmp_path):
    with pytest.raises(ConfigError, match=f"{key}.*{INSTEAD}"):
        load(config, overrides={key: "30"}, environ={})
    file = tmp_path / "config.yaml"
    *parents, last = key.split(".")
    file.write_text("".join(f"{parent}: " for parent in parents) + "{" + f"{last}: 30" + "}")
    with pytest.raises(ConfigError, match=f"there is no setting '{key}': {INSTEAD}"):
        load(config, file=file, environ={})
    with pytest.raises(ConfigError, match=f"{key}.*{INSTEAD}"):
        from_command_line(config, prog="p", description="", argv=[f"--{key.replace('_', '-')}", "30"]).load()


def test_a_removed_key_with_a_section_is_refused_from_the_environment_too():
    with pytest.raises(ConfigError, match=f"PENSTOCK_DETECTION__WEDGED_AFTER.*{INSTEAD}"):
        load(FrontendConfig, environ={"PENSTOCK_DETECTION__WEDGED_AFTER": "30"})


def test_an_engines_setting_in_a_shared_environment_does_not_disturb_the_coordinator():
    assert load(CoordinatorConfig, environ={"PENSTOCK_WEDGED_AFTER": "30"}) == CoordinatorConfig()


def test_every_field_can_be_set_from_the_environment():
    keys = {setting.key for setting in settings_of(CoordinatorConfig)}
    assert keys >= {"lease_seconds", "restart_grace", "server.port", "log.format"}
    assert load(CoordinatorConfig, environ={"PENSTOCK_LEASE_SECONDS": "7"}).lease_seconds == 7.0


def test_the_fewest_engines_are_those_of_a_pool_that_somebody_scales():
    pools = {"deployments": {"default": "engines"}, "owners": {"spot": "ScaledObject s"}}
    assert KubernetesConfig(**pools, min_replicas={"default": 1, "spot": 2}).min_replicas["default"] == 1
    with pytest.raises(ConfigError, match=r"kubernetes\.min_replicas has pool 'defualt'.*did you mean 'default'"):
        KubernetesConfig(**pools, min_replicas={"defualt": 1})
    with pytest.raises(ConfigError, match=r"min_replicas\.default is 9; it must not exceed max_replicas = 8"):
        KubernetesConfig(**pools, min_replicas={"default": 9}, max_replicas=8)
    assert KubernetesConfig(min_replicas={"default": 1}).pools == set()


def test_the_engines_of_a_pool_are_one_pod_each_or_several():
    config = KubernetesConfig(deployments={"default": "engines"}, leader_worker_sets={"wide": "engines-wide"})
    assert config.pools == {"default", "wide"}
    assert KubernetesConfig(leader_worker_sets={"wide": "engines-wide"}).enabled
    with pytest.raises(ConfigError, match=r"deployments and kubernetes\.leader_worker_sets both have pool 'wide'"):
        KubernetesConfig(deployments={"wide": "a"}, leader_worker_sets={"wide": "b"})
    sets = {"stateful_sets": {"wide": "b"}}
    assert KubernetesConfig(**sets).enabled
    with pytest.raises(ConfigError, match=r"leader_worker_sets and kubernetes\.stateful_sets both have pool 'wide'"):
        KubernetesConfig(leader_worker_sets={"wide": "a"}, **sets)
    with pytest.raises(ConfigError, match=r"ranks_per_pod has pool 'one', but kubernetes\.stateful_sets does not"):
        KubernetesConfig(ranks_per_pod={"one": 2}, **sets)
    with pytest.raises(ConfigError, match=r"min_replicas has pool 'wdie'"):
        KubernetesConfig(leader_worker_sets={"wide": "b"}, min_replicas={"wdie": 1})
