"""enginecore/configmap.yaml and _config.tpl: values become settings, and the chart's own settings override them."""

from pathlib import Path

import pytest

from charts.lint import ChartError
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
    assert config.coordinator.advertise == POD_IP  # without a port, because the server adds its own port
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


def test_without_a_method_nothing_is_said_of_speculation():
    assert "speculative" not in release(HUB).config("enginecore")


def test_the_drafter_setting_reaches_the_engine(tmp_path: Path):
    more = ("enginecore.speculative.method=suffix", "enginecore.config.speculative.suffix_decoding_max_tree_depth=32")
    config = load(release(HUB, *more, "enginecore.speculative.tokens=8"), "enginecore", tmp_path)
    assert isinstance(config, EngineCoreConfig)
    speculative = config.speculative
    assert (speculative.method, speculative.num_speculative_tokens) == ("suffix", 8)
    assert speculative.suffix_decoding_max_tree_depth == 32


@pytest.mark.parametrize("method", ["draft_model", "eagle", "eagle3"])
def test_what_drafts_is_on_the_volume_of_the_model_or_on_the_hub(method: str, tmp_path: Path):
    values = (f"enginecore.speculative.method={method}", "enginecore.speculative.model=heads/chat")
    for values_set, path in ((BARE, "/var/lib/penstock/model/heads/chat"), (HUB, "heads/chat")):
        config = load(release(values_set, *values), "enginecore", tmp_path)
        assert isinstance(config, EngineCoreConfig)
        assert config.speculative.model == path
        assert config.speculative.num_speculative_tokens == 5


def test_a_layer_of_the_model_drafts_without_a_model_of_its_own(tmp_path: Path):
    values = ("enginecore.speculative.method=mtp", "enginecore.speculative.tokens=2")
    config = load(release(HUB, *values), "enginecore", tmp_path)
    assert isinstance(config, EngineCoreConfig)
    speculative = config.speculative
    assert (speculative.method, speculative.model, speculative.num_speculative_tokens) == ("mtp", "", 2)


def test_pools_draft_each_in_its_way():
    rendered = release(POOLS, "enginecore.speculative.method=ngram", "enginecore.pools.spot.speculative.method=suffix")
    assert rendered.config("enginecore")["speculative"]["method"] == "ngram"
    assert rendered.config("enginecore-spot")["speculative"]["method"] == "suffix"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (["method=draft_model"], r"enginecore.speculative.model is required when method is draft_model"),
        (
            ["method=ngram", "model=x"],
            r"enginecore.speculative.model is x, but only the methods draft_model",
        ),
        (["model=x"], r"enginecore.speculative.model is x, but only the methods"),
        (["method=mtp", "model=x"], r"enginecore.speculative.model is x, but only the methods"),
        (["method=ngrm"], "enginecore.speculative.method"),
        (["method=ngram", "tokens=0"], "enginecore.speculative.tokens"),
        (["method=ngram", "tokens=33"], "enginecore.speculative.tokens"),
    ],
)
def test_speculation_that_cannot_be_is_refused(values: list[str], message: str):
    with pytest.raises(ChartError, match=message):
        release(HUB, *(f"enginecore.speculative.{value}" for value in values))
