"""frontend/configmap.yaml and _config.tpl: what the values say, over which stands what the chart alone knows."""

from pathlib import Path

from penstock_frontend.config import FrontendConfig
from tests.chart.rendering import HUB, load, release


def test_settings_of_the_values_reach_the_frontend(tmp_path: Path):
    settings = (
        "frontend.config.limits.max_n=3",
        "frontend.config.http.max_body_bytes=1MiB",
        "frontend.drainTimeoutSeconds=210",
    )
    config = load(release(HUB, *settings), "frontend", tmp_path)
    assert isinstance(config, FrontendConfig)
    assert (config.limits.max_n, config.http.max_body_bytes, config.drain_timeout) == (3, 1024**2, 210)
    assert (config.server.port, config.http.port) == (50051, 8000)


def test_without_settings_the_frontends_own_defaults_hold(tmp_path: Path):
    config = load(release(HUB), "frontend", tmp_path)
    assert isinstance(config, FrontendConfig)
    own = FrontendConfig(model=config.model, coordinator=config.coordinator)
    assert (config.limits, config.retries, config.detection) == (own.limits, own.retries, own.detection)
    assert (config.auth, config.engine_tls, config.admin) == (own.auth, own.engine_tls, own.admin)


def test_settings_beside_the_charts_own_are_kept_with_them(tmp_path: Path):
    settings = ("frontend.edge.apiKeysSecretName=keys", "frontend.config.auth.admin=true")
    config = load(release(HUB, *settings), "frontend", tmp_path)
    assert isinstance(config, FrontendConfig)
    assert (config.auth.api_keys, config.auth.admin) == ("/etc/penstock-keys/api-keys", True)


def test_a_frontend_is_ready_without_engines_where_there_may_be_none(tmp_path: Path):
    def ready_without(*settings: str) -> bool:
        config = load(release(HUB, *settings), "frontend", tmp_path)
        assert isinstance(config, FrontendConfig)
        return config.ready_without_engines

    assert not ready_without()
    assert ready_without("enginecore.replicas=0")
    assert not ready_without("enginecore.replicas=0", "enginecore.autoscaling.mode=hpa")
    assert ready_without("enginecore.autoscaling.mode=keda", "enginecore.autoscaling.minReplicas=0")
    assert ready_without("enginecore.pools.a.replicas=0", "enginecore.pools.b.replicas=0")
    assert not ready_without("enginecore.pools.a.replicas=0", "enginecore.pools.b.replicas=1")


def test_a_drain_has_the_time_that_moves_the_clients(tmp_path: Path):
    rendered = release(HUB)
    config = load(rendered, "frontend", tmp_path)
    assert isinstance(config, FrontendConfig)
    assert config.drain_timeout > 1.1 * config.server.max_connection_age > 0
    assert rendered.pod_spec("frontend")["terminationGracePeriodSeconds"] > config.drain_timeout + 10
