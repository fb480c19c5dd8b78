"""edge/inferencepool.yaml: the frontends as endpoints for an endpoint picker, which reads their metrics."""

from pathlib import Path

import pytest

from charts.lint import ChartError
from penstock_frontend.config import FrontendConfig
from tests.chart.rendering import HUB, load, release

ON = ("frontend.inferencePool.enabled=true", "frontend.inferencePool.endpointPicker.name=picker")


def test_without_the_value_there_is_none():
    assert not release(HUB).all("InferencePool")


def test_its_members_are_the_frontends_at_their_http_port():
    rendered = release(HUB, *ON)
    spec = rendered.one("InferencePool", "frontend")["spec"]
    labels = rendered.pod("frontend")["metadata"]["labels"]
    assert spec["selector"]["matchLabels"].items() <= labels.items()
    assert not spec["selector"]["matchLabels"].items() <= rendered.pod("enginecore")["metadata"]["labels"].items()
    assert spec["targetPorts"] == [{"number": rendered.config("frontend")["http"]["port"]}]
    assert spec["endpointPickerRef"] == {"name": "picker", "port": {"number": 9002}, "failureMode": "FailOpen"}


def test_pickers_find_the_load_of_engines_in_the_frontends_metrics(tmp_path: Path):
    config = load(release(HUB, *ON), "frontend", tmp_path)
    assert isinstance(config, FrontendConfig)
    assert config.http.engine_metrics


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("frontend.inferencePool.endpointPicker.name=", "frontend.inferencePool.endpointPicker.name is required"),
        ("frontend.edge.tlsSecretName=edge", "frontend.inferencePool.enabled is true, but frontends use TLS"),
        ("frontend.edge.certManager.issuerRef.name=a", "frontend.edge.certManager.dnsNames is required"),
        ("frontend.config.auth.metrics=true", "frontend.config.auth.metrics is true; .* it must be false"),
        ("frontend.inferencePool.endpointPicker.failureMode=No", "failureMode must be one of the following"),
    ],
)
def test_what_a_picker_could_not_read_is_refused(setting: str, message: str):
    with pytest.raises(ChartError, match=message):
        release(HUB, *ON, setting)
