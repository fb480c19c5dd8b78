"""frontend/configmap.yaml and _config.tpl: values become settings, and the chart's own settings override them."""

from pathlib import Path

from penstock_frontend.config import FrontendConfig, MediaConfig
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


def test_media_are_taken_as_the_values_say(tmp_path: Path):
    settings = (
        "frontend.media.workers=3",
        "frontend.media.workerMemory=512MiB",
        "frontend.media.allowedDomains={images.example.org,*.example.com}",
        "frontend.config.media.max_pixels=1000",
    )
    config = load(release(HUB, *settings), "frontend", tmp_path)
    assert isinstance(config, FrontendConfig)
    assert (config.media.workers, config.media.worker_memory, config.media.max_pixels) == (3, 512 * 1024**2, 1000)
    assert config.media.allowed_domains == ("images.example.org", "*.example.com")


def test_without_values_of_media_the_frontends_own_hold(tmp_path: Path):
    config = load(release(HUB), "frontend", tmp_path)
    assert isinstance(config, FrontendConfig)
    assert config.media == MediaConfig()


def test_a_frontend_takes_no_media_that_engines_do_not(tmp_path: Path):
    for setting in ("frontend.media.enabled=false", "enginecore.multimodal.enabled=false"):
        config = load(release(HUB, setting), "frontend", tmp_path)
        assert isinstance(config, FrontendConfig)
        assert not config.media.enabled


def test_engines_load_no_towers_where_the_values_say_so():
    assert "multimodal" not in release(HUB).config("enginecore")
    without = release(HUB, "enginecore.multimodal.enabled=false")
    assert without.config("enginecore")["multimodal"] == {"enabled": False}
