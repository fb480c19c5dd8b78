"""monitoring/dashboard.yaml: the unchanged dashboard of ``make dashboard``, rendered only if enabled."""

import json

import pytest

from charts.monitoring.panels import ROWS
from tests.chart.rendering import HUB, Release, release

ON = "metrics.dashboard.enabled=true"


def config_map(rendered: Release) -> dict:
    (found,) = [m for m in rendered.all("ConfigMap") if m["metadata"]["name"].endswith("-dashboard")]
    return found


def model() -> dict:
    return json.loads(config_map(release(HUB, ON))["data"]["penstock.json"])


def test_nothing_is_there_unless_it_is_asked_for():
    assert len(release(HUB, ON).all("ConfigMap")) == len(release(HUB).all("ConfigMap")) + 1


def test_grafanas_sidecar_finds_it():
    settings = ("metrics.dashboard.labels.team=llm", "metrics.dashboard.annotations.grafana_folder=LLM")
    metadata = config_map(release(HUB, ON, *settings))["metadata"]
    assert (metadata["labels"]["grafana_dashboard"], metadata["labels"]["team"]) == ("1", "llm")
    assert metadata["annotations"] == {"grafana_folder": "LLM"}
    assert "annotations" not in config_map(release(HUB, ON))["metadata"]


def test_the_file_is_what_is_written_from_the_panels():
    pytest.importorskip(
        "grafana_foundation_sdk", reason="grafana-foundation-sdk is not installed: make setup installs it"
    )
    from charts.monitoring import dashboard

    assert dashboard.FILE.read_text(encoding="utf-8") == dashboard.text(), "run make dashboard"


def test_every_panel_is_there_once_in_its_row_and_nothing_overlaps():
    panels = model()["panels"]
    titles = [panel["title"] for panel in panels]
    assert titles == [title for row in ROWS for title in (row.title, *(panel.title for panel in row.panels))]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken = set()
    for panel in panels:
        at = panel["gridPos"]
        cells = {(at["x"] + dx, at["y"] + dy) for dx in range(at["w"]) for dy in range(at["h"])}
        assert not cells & taken, panel["title"]
        assert max(x for x, _ in cells) < 24
        taken |= cells


def test_queries_use_the_variables_that_there_are():
    known = {variable["name"] for variable in model()["templating"]["list"]}
    assert known == {"datasource", "namespace", "release", "pool"}
    for panel in model()["panels"]:
        for target in panel.get("targets", []):
            assert 'namespace="$namespace",release="$release"' in target["expr"]
            assert target["datasource"]["uid"] == "${datasource}"
