"""enginecore/configmap.yaml and _config.tpl: what the values say, over which stands what the chart alone knows."""

from pathlib import Path

from penstock_enginecore.config import EngineCoreConfig
from tests.chart.rendering import AUTOSCALED, BARE, DEMO, HUB, POD_IP, POOLS, load, release


def test_values_reach_the_engine(tmp_path: Path):
    config = load(release(AUTOSCALED), "enginecore", tmp_path)
    assert isinstance(config, EngineCoreConfig)
    assert config.model.name == "chat"
    assert (config.model.dtype, config.model.max_model_len) == ("bfloat16", 32768)
    assert config.scheduler.max_waiting_tokens == 100_000_000
    assert config.server.max_message_bytes == 128 * 1024**2
    assert (config.server.port, config.metrics.port) == (50052, 9100)
    assert config.drain_timeout == 300
    assert config.engine_id == "from-the-cluster"
    assert config.coordinator.advertise == POD_IP  # the port is the server's
    assert config.log.format == "json"


def test_engines_know_their_pool(tmp_path: Path):
    for component, pool in (("enginecore", "default"), ("enginecore-spot", "spot")):
        config = load(release(POOLS), component, tmp_path)
        assert isinstance(config, EngineCoreConfig)
        assert config.pool == pool == release(POOLS).pod(component)["metadata"]["labels"]["penstock.io/pool"]


def test_the_demo_is_small(tmp_path: Path):
    config = load(release(DEMO), "enginecore", tmp_path)
    assert isinstance(config, EngineCoreConfig)
    assert config.cache.kv_cache_memory == 256 * 1024**2
    assert config.executor.num_threads == 1


def test_without_settings_the_engines_own_defaults_hold(tmp_path: Path):
    config = load(release(HUB), "enginecore", tmp_path)
    assert isinstance(config, EngineCoreConfig)
    own = EngineCoreConfig(model=config.model)
    assert (config.cache, config.scheduler, config.kernels) == (own.cache, own.scheduler, own.kernels)


def test_the_device_follows_the_gpus_that_are_asked_for():
    assert release(AUTOSCALED).config("enginecore")["model"]["device"] == "cuda"
    assert release(BARE).config("enginecore")["model"]["device"] == "cpu"
