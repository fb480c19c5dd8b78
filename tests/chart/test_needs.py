"""_needs.tpl: values without effect are refused, according to charts/value_needs.py and the services' own tables."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from charts import lint, value_needs
from charts.lint import ChartError
from charts.value_needs import ROOT
from tests.chart.rendering import HUB, VALUE_SETS, release

OTHERS = (("networkPolicy.", "networkPolicy.enabled", True), ("autoscaling.hpa.selector", "autoscaling.mode", "hpa"))
TABLE = json.loads(value_needs.text())


def test_the_file_is_that_of_the_tables():
    assert value_needs.FILE.read_text(encoding="utf-8") == value_needs.text(), "run make settings"


def nested(path: str, value: Any) -> dict[str, Any]:
    for key in reversed(path.split(".")):
        value = {key: value}
    return value


def merged(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    for key, value in other.items():
        one[key] = (
            merged(one.get(key, {}), value) if isinstance(value, dict) and isinstance(one.get(key), dict) else value
        )
    return one


def another(default: Any) -> Any:
    if isinstance(default, bool):
        return not default
    if isinstance(default, (int, float)):
        return default + 1
    return {dict: {"a": "b"}, list: ["a"], str: "other"}[type(default)]


def off(condition: dict[str, Any]) -> Any:
    """Return a value for which the condition is false."""
    if condition["values"]:
        words = {"autoscaling.mode": ("hpa", "keda", "none"), "autoscaling.hpa.metrics": ("Pods",)}[
            condition["setting"]
        ]
        several = len(condition["values"]) > 1
        return "none" if several else next(word for word in words if json.dumps(word) not in condition["values"])
    default = condition["default"]
    return 1 if '"0"' not in condition["off"] else type(default)()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    rows = [("", row) for row in TABLE["all"]] + [("enginecore.", row) for row in TABLE["pools"]]
    if "prefix" in metafunc.fixturenames:
        chosen = {f"{prefix}{row['needs']}": (prefix, row) for prefix, row in rows}  # one value of each condition
        metafunc.parametrize(("prefix", "row"), chosen.values(), ids=chosen.keys())


def test_a_value_without_effect_is_refused_with_the_value_that_it_needs(
    prefix: str, row: dict[str, Any], tmp_path: Path
) -> None:
    condition = row["any_of"][0]  # the other alternatives are off by default
    values = {"model": {"hub": {"id": "example/model"}}}
    if condition["setting"].removeprefix(ROOT) == "model.source":
        values = {"model": {"source": "image", "image": {"path": "/model"}}}
        if row["setting"].startswith("model.image"):
            values = {"model": {"hub": {"id": "example/model"}}}
    else:
        name = condition["setting"]
        merged(values, nested(prefix + name, off(condition)))
    for path, need, value in OTHERS:  # other conditions of the same value, which the chart checks first
        if row["setting"].startswith(path) and condition["setting"] != need:
            merged(values, nested(prefix + need, value))
    merged(values, nested(prefix + row["setting"], another(row["default"])))
    file = tmp_path / "values.yaml"
    file.write_text(yaml.safe_dump(values))
    with pytest.raises(ChartError) as refused:
        lint.helm(
            "template", "demo", str(lint.CHART), f"--values={file}", "--kube-version=1.37", "--skip-schema-validation"
        )
    assert f"{prefix}{row['setting']} is " in str(refused.value)
    assert f"which has no effect: it needs {row['needs']}; set that as well" in str(refused.value)


def test_adapters_without_the_switch_are_refused():
    with pytest.raises(ChartError, match=r"enginecore.lora.adapters is .* it needs lora.enabled; set that as well"):
        release(HUB, "enginecore.lora.adapters.pirate=/pirate")
    with pytest.raises(ChartError, match=r"enginecore.lora.claimName is adapters, .* it needs lora.enabled"):
        release(HUB, "enginecore.lora.claimName=adapters")
    release(HUB, "enginecore.lora.adapters.pirate=/pirate", "enginecore.lora.enabled=true")


def test_a_value_of_all_pools_must_have_an_effect_in_one_and_a_pools_own_in_that_one():
    pools = ("enginecore.lora.maxLoras=4", "enginecore.pools.a.lora.enabled=true", "enginecore.pools.b.replicas=2")
    release(HUB, *pools)
    with pytest.raises(ChartError, match=r"enginecore.pools.b.lora.maxRank is 8, .* it needs lora.enabled"):
        release(HUB, *pools, "enginecore.pools.b.lora.maxRank=8")


def test_settings_in_config_are_refused_when_the_chart_is_rendered():
    with pytest.raises(ChartError, match=r"frontend.config.lora.scan_interval is 1, .* it needs lora.directory"):
        release(HUB, "frontend.config.lora.scan_interval=1")
    with pytest.raises(ChartError, match=r"enginecore.config.kv_transfer.arena is 1GiB, .* auto or shared_memory"):
        release(HUB, "enginecore.config.kv_transfer.arena=1GiB")
    release(HUB, "enginecore.config.kv_transfer.arena=64MiB", "frontend.config.lora.scan_interval=2")
    with pytest.raises(ChartError, match=r"coordinator.config.kubernetes.max_replicas is 7, .* it needs kubernetes"):
        release(HUB, "coordinator.config.kubernetes.max_replicas=7")
    release(HUB, "coordinator.config.kubernetes.max_replicas=7", "coordinator.kubernetes.scale=true")


@pytest.mark.parametrize("name", VALUE_SETS)
def test_value_sets_have_nothing_without_effect(name: str) -> None:
    release(name)
