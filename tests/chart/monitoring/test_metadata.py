"""monitoring/_metadata.tpl: common and separate labels and annotations of objects. Labels of the release stay."""

import pytest

from tests.chart.rendering import HUB, release

ON = ("metrics.podMonitor.enabled=true", "metrics.prometheusRule.enabled=true", "metrics.dashboard.enabled=true")
KINDS = {"PodMonitor": "podMonitor", "PrometheusRule": "prometheusRule"}


@pytest.mark.parametrize("kind", KINDS)
def test_objects_have_common_labels_and_their_own(kind: str):
    own = (f"metrics.{KINDS[kind]}.labels.prometheus=main", "commonLabels.team=llm", "commonAnnotations.owner=me")
    plain, marked = release(HUB, *ON).all(kind), release(HUB, *ON, *own).all(kind)
    assert plain
    for before, after in zip(plain, marked, strict=True):
        labels = before["metadata"]["labels"]
        assert after["metadata"]["labels"] == labels | {"prometheus": "main", "team": "llm"}
        assert after["metadata"]["annotations"] == {"owner": "me"}
        assert "annotations" not in before["metadata"]


def test_whose_an_object_is_cannot_be_overwritten():
    setting = r"metrics.prometheusRule.labels.app\.kubernetes\.io/instance=other"
    (rule,) = release(HUB, *ON, setting).all("PrometheusRule")
    assert rule["metadata"]["labels"]["app.kubernetes.io/instance"] == "demo"
