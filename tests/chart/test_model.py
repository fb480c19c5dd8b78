"""Where the model comes from."""

import pytest

from charts.lint import ChartError
from tests.chart.rendering import AUTOSCALED, BARE, DEMO, HUB, release

READERS = ("frontend", "enginecore")
CACHE = "/var/cache/penstock"
VOLUME = "/var/lib/penstock/model"


@pytest.mark.parametrize("component", READERS)
def test_a_hub_model_is_downloaded_with_the_token_of_a_secret(component: str):
    rendered = release(AUTOSCALED)
    model = rendered.config(component)["model"]
    assert (model["path"], model["revision"]) == ("example/model-70b", "0123456789")
    assert model["served_model_name"] == "chat"
    env = rendered.env(component)
    assert env["HF_TOKEN"]["valueFrom"] == {"secretKeyRef": {"name": "hub-token", "key": "token"}}
    assert env["HF_HOME"]["value"] == CACHE
    assert "HF_HUB_OFFLINE" not in env
    assert CACHE in rendered.mounts(component)


@pytest.mark.parametrize("component", READERS)
def test_a_public_hub_model_needs_no_token(component: str):
    rendered = release(HUB)
    assert "HF_TOKEN" not in rendered.env(component)
    model = rendered.config(component)["model"]
    assert model["path"] == "example/model-1b"
    assert not {"revision", "served_model_name"} & model.keys()


@pytest.mark.parametrize("component", READERS)
def test_a_model_on_a_volume_is_mounted_read_only_and_nothing_is_downloaded(component: str):
    rendered = release(BARE)
    assert rendered.config(component)["model"]["path"] == f"{VOLUME}/llama/8b"
    assert rendered.volumes(component)["model"]["persistentVolumeClaim"] == {"claimName": "models", "readOnly": True}
    assert rendered.mounts(component)[VOLUME]["readOnly"] is True
    assert rendered.env(component)["HF_HUB_OFFLINE"]["value"] == "1"
    assert "HF_TOKEN" not in rendered.env(component)


def test_a_model_at_the_root_of_a_volume():
    settings = ("model.source=pvc", "model.pvc.claimName=m", "model.servedName=x")
    assert release(HUB, *settings).config("enginecore")["model"]["path"] == VOLUME


@pytest.mark.parametrize("component", READERS)
def test_the_demo_model_is_in_the_images(component: str):
    rendered = release(DEMO)
    assert rendered.config(component)["model"]["path"] == "/opt/penstock/demo-model"
    assert rendered.env(component)["HF_HUB_OFFLINE"]["value"] == "1"
    assert "model" not in rendered.volumes(component)


def test_the_coordinator_knows_nothing_of_the_model():
    rendered = release(BARE)
    assert "model" not in rendered.config("coordinator")
    assert not rendered.env("coordinator").keys() - {"HOME"}
    assert rendered.volumes("coordinator").keys() == {"config", "tmp"}


def test_downloads_go_to_a_volume_of_the_pod_or_to_a_shared_one():
    assert release(HUB).volumes("enginecore")["cache"]["emptyDir"] == {"sizeLimit": "100Gi"}
    assert release(AUTOSCALED).volumes("enginecore")["cache"] == {
        "name": "cache",
        "persistentVolumeClaim": {"claimName": "model-cache"},
    }


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (("model.hub.id=",), "model.hub.id is required, .*profiles/cpu-demo-values.yaml"),
        (("model.source=pvc",), "model.pvc.claimName is required when model.source is pvc"),
        (("model.source=image",), "model.image.path is required when model.source is image"),
    ],
)
def test_a_source_without_its_model_is_refused(settings: tuple[str, ...], message: str):
    with pytest.raises(ChartError, match=message):
        release(HUB, *settings)
