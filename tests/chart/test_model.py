"""Sources of the model: volumes, images and downloads."""

import pytest

from charts.lint import ChartError
from tests.chart.rendering import AUTOSCALED, BARE, DEMO, FETCHED, HUB, OCI, release

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


def test_frontends_alone_know_the_models_other_names():
    rendered = release(HUB, "model.aliases.gpt-4o=", "model.aliases.sailor=pirate", "enginecore.lora.enabled=true")
    assert rendered.config("frontend")["model"]["aliases"] == {"gpt-4o": "", "sailor": "pirate"}
    assert "aliases" not in rendered.config("enginecore")["model"]
    assert "aliases" not in release(HUB).config("frontend")["model"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (("model.servedName=chat", "model.aliases.chat="), "model.aliases: chat is also model.servedName"),
        (("model.aliases.a=b", "model.aliases.b="), "model.aliases.a is b, which is an alias too"),
        (
            ("model.aliases.pirate=", "enginecore.lora.enabled=true", "enginecore.lora.adapters.pirate=/pirate"),
            "model.aliases: pirate is also the name of a LoRA adapter in lora.adapters of the pool default",
        ),
    ],
)
def test_a_name_that_means_two_things_is_refused(settings: tuple[str, ...], message: str):
    with pytest.raises(ChartError, match=message):
        release(HUB, *settings)


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
    settings = ("model.source=pvc", "model.hub.id=", "model.pvc.claimName=m", "model.servedName=x")
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
    assert release(HUB).volumes("enginecore")["cache"]["emptyDir"] == {}
    assert release(HUB, "enginecore.modelCache.sizeLimit=7Gi").volumes("enginecore")["cache"]["emptyDir"] == {
        "sizeLimit": "7Gi"
    }
    assert release(AUTOSCALED).volumes("enginecore")["cache"] == {
        "name": "cache",
        "persistentVolumeClaim": {"claimName": "model-cache"},
    }


def test_room_on_the_node_is_requested_where_the_model_is_downloaded_to_it():
    def requested(name: str, *settings: str) -> str | None:
        return (
            release(name, *settings).container("enginecore")["resources"].get("requests", {}).get("ephemeral-storage")
        )

    assert requested(HUB) == "20Gi"
    assert requested(HUB, "enginecore.modelCache.size=160Gi") == "160Gi"
    assert requested(HUB, "enginecore.modelCache.size=") is None
    assert requested(HUB, "enginecore.resources.requests.ephemeral-storage=1Gi") == "1Gi"
    assert requested(FETCHED) == "160Gi"
    assert [requested(name) for name in (AUTOSCALED, BARE, DEMO, OCI)] == [None] * 4


def test_files_written_at_run_time_are_on_a_volume():
    """Checks the folders of written files, because the root file system is read-only."""
    env = release(HUB).env("enginecore")
    caches = {name for name in env if name.endswith(("_CACHE_DIR", "_CACHE_HOME", "_CACHE_PATH", "HF_HOME"))}
    assert caches == {"HF_HOME", "XDG_CACHE_HOME", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "CUDA_CACHE_PATH"}
    assert all(env[name]["value"].startswith(CACHE) for name in caches)
    assert len({env[name]["value"] for name in caches}) == 4  # compiled files and downloads are in different folders
    assert env["HOME"]["value"] == "/tmp"
    assert not {"TRITON_CACHE_DIR", "CUDA_CACHE_PATH"} & release(HUB).env("frontend").keys()


@pytest.mark.parametrize("component", READERS)
def test_a_model_in_an_image_of_its_own_is_mounted(component: str):
    rendered = release(OCI)
    assert rendered.volumes(component)["model"]["image"] == {
        "reference": f"registry.example/models/llama-8b@sha256:{'0' * 63}2",
        "pullPolicy": "IfNotPresent",
    }
    assert rendered.mounts(component)[VOLUME]["readOnly"] is True
    assert rendered.config(component)["model"]["path"] == f"{VOLUME}/llama/8b"
    assert rendered.env(component)["HF_HUB_OFFLINE"]["value"] == "1"
    assert rendered.pod_spec(component)["imagePullSecrets"] == [{"name": "registry-key"}]


def test_volumes_from_images_need_a_kubernetes_that_has_them():
    with pytest.raises(ChartError, match=r"model.source oci needs Kubernetes 1.35 or later .*; this is v1.34"):
        release(OCI, kube_version="1.34")


@pytest.mark.parametrize("component", READERS)
def test_a_model_on_the_nodes_is_mounted_read_only(component: str):
    rendered = release(
        HUB, "model.hub.id=", "model.source=hostPath", "model.hostPath.path=/srv/models/llama", "model.servedName=chat"
    )
    assert rendered.volumes(component)["model"]["hostPath"] == {"path": "/srv/models/llama", "type": "Directory"}
    assert rendered.mounts(component)[VOLUME]["readOnly"] is True
    assert rendered.config(component)["model"]["path"] == VOLUME


@pytest.mark.parametrize("component", READERS)
def test_init_containers_write_the_model_and_the_service_reads_it(component: str):
    rendered = release(FETCHED)
    fetch = rendered.before(component)["fetch"]
    assert {"name": "MODEL_DIR", "value": VOLUME} in fetch["env"]
    assert {"name": "COMPONENT", "value": component} in fetch["env"]
    assert {"name": "AWS_REGION", "value": "eu-central-1"} in fetch["env"]
    mounts = {mount["mountPath"]: mount for mount in fetch["volumeMounts"]}
    assert mounts.keys() == {VOLUME, "/tmp", "/etc/ssl/trusted"}
    assert "readOnly" not in mounts[VOLUME]
    assert rendered.volumes(component)["model"]["emptyDir"] == {}
    assert rendered.mounts(component)[VOLUME]["readOnly"] is True
    assert rendered.config(component)["model"]["path"] == f"{VOLUME}/llama/8b"


def test_only_what_reads_the_model_fetches_it():
    assert list(release(FETCHED).before("coordinator")) == ["logs", "wait"]
    for name in (HUB, BARE, OCI):
        assert release(name).before("enginecore") == {}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (("model.hub.id=",), "model.hub.id is required, .*charts/penstock/profiles/cpu-demo-values.yaml"),
        (("model.source=pvc",), "model.pvc.claimName is required when model.source is pvc"),
        (("model.source=image",), "model.image.path is required when model.source is image"),
        (("model.source=oci",), "model.oci.reference is required when model.source is oci"),
        (("model.source=hostPath",), "model.hostPath.path is required when model.source is hostPath"),
        (("model.source=init",), "model.init.containers is required when model.source is init"),
        (("model.hostPath.path=models",), "model.hostPath.path: Does not match pattern"),
        (("model.oci.pullPolicy=Sometimes",), "model.oci.pullPolicy must be one of"),
        (("model.oci.path=/abs",), "model.oci.path: Does not match pattern"),
        (("model.init.containers[0].name=x",), "model.init.containers.0: image is required"),
        (("enginecore.modelCache.size=20GB",), "enginecore.modelCache.size: Does not match pattern"),
    ],
)
def test_a_source_without_its_model_is_refused(settings: tuple[str, ...], message: str):
    with pytest.raises(ChartError, match=message):
        release(HUB, *settings, kube_version="1.36")


def test_only_downloads_use_the_proxy_and_the_mirror():
    rendered = release(AUTOSCALED)
    for service in ("frontend", "enginecore"):
        env = rendered.env(service)
        assert env["HF_ENDPOINT"]["value"] == "https://hub.example.internal"
        assert env["HTTPS_PROXY"]["value"] == "http://proxy.example:3128"
        assert env["NO_PROXY"]["value"] == "localhost,127.0.0.1,::1,.svc,.cluster.local,.example.internal"
        # gRPC would read variables with lower-case names.
        assert not [name for name in env if name.lower() == name]
        coordinator = rendered.config(service)["coordinator"]["address"]
        assert coordinator.rpartition(":")[0].endswith(".svc")
    assert not [name for name in rendered.env("coordinator") if "PROXY" in name]
    fetch = release(FETCHED, "proxy.https=http://proxy.example:3128").before("enginecore")["fetch"]
    assert "HTTPS_PROXY" in [entry["name"] for entry in fetch["env"]]


def test_without_a_proxy_none_is_set():
    for service in ("frontend", "enginecore"):
        assert not [name for name in release(HUB).env(service) if "PROXY" in name or name == "HF_ENDPOINT"]


def test_a_proxy_beside_one_in_extra_env_is_refused():
    with pytest.raises(ChartError, match="enginecore.extraEnv has NO_PROXY, which the chart sets"):
        release(
            *(HUB, "proxy.http=http://p:1", "enginecore.extraEnv[0].name=NO_PROXY", "enginecore.extraEnv[0].value=a")
        )
    release(HUB, "enginecore.extraEnv[0].name=NO_PROXY", "enginecore.extraEnv[0].value=a")
