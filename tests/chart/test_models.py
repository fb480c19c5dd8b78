"""Several models behind the frontends of one release: values ``models``, and ``modelName`` of pools."""

from pathlib import Path

import pytest

from charts.lint import ChartError
from tests.chart.rendering import HUB, load, release

MODELS = "models"


def test_each_model_has_its_pools_and_the_frontends_know_all_of_them(tmp_path: Path):
    rendered = release(MODELS)
    frontend = load(rendered, "frontend", tmp_path)
    assert [each.model.name for each in frontend.per_model()] == ["chat", "minilm"]
    assert [each.coordinator.pools for each in frontend.per_model()] == [("default", "spot"), ("embedder",)]
    assert [dict(each.model.aliases) for each in frontend.per_model()] == [
        {"gpt-4o": ""},
        {"text-embedding-3-small": ""},
    ]
    engines = {c: load(rendered, c, tmp_path) for c in ("enginecore", "enginecore-spot", "enginecore-embedder")}
    models = {engine.pool: engine.model for engine in engines.values()}
    assert {pool: model.served_model_name for pool, model in models.items()} == {
        "default": "chat",
        "spot": "chat",
        "embedder": "minilm",
    }
    assert models["embedder"].path == frontend.models[0].model.path == "/var/lib/penstock/model/all-MiniLM-L6-v2"
    assert rendered.one("Deployment", "enginecore-embedder")["spec"]["replicas"] == 2


def test_a_further_model_of_the_hub_has_an_id_and_a_revision(tmp_path: Path):
    rendered = release(
        HUB, "models[0].name=m", "models[0].path=org/m", "models[0].revision=v1", "enginecore.pools.default.replicas=1",
        "enginecore.pools.small.modelName=m",
    )  # fmt: skip
    (further,) = load(rendered, "frontend", tmp_path).models
    assert (further.model.path, further.model.revision) == ("org/m", "v1")
    assert load(rendered, "enginecore-small", tmp_path).model.path == "org/m"


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("enginecore.pools.embedder.modelName=mini", r"pools.embedder.modelName is mini, .*; names: minilm"),
        ("enginecore.pools.embedder.modelName=", "no pool serves the model minilm of models"),
        ("models[0].path=/m", "the path of minilm is /m, but model.source is pvc"),
    ],
)
def test_models_without_pools_or_paths_are_refused(setting: str, said: str):
    with pytest.raises(ChartError, match=said):
        release(MODELS, setting)


def test_the_first_model_needs_a_pool_too():
    names = [f"enginecore.pools.{pool}.modelName=minilm" for pool in ("default", "spot")]
    with pytest.raises(ChartError, match="no pool serves the model in model"):
        release(MODELS, *names)


def test_adapters_of_a_further_model_are_refused():
    lora = ("enginecore.pools.embedder.lora.enabled=true", "enginecore.pools.embedder.lora.claimName=adapters")
    with pytest.raises(ChartError, match="the chart serves LoRA adapters only of the model in model"):
        release(MODELS, *lora)
