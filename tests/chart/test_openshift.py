"""ci/openshift-values.yaml: pods that OpenShift's SCC restricted-v2 admits without changes."""

from typing import Any

import pytest

from charts import lint
from charts.lint import ChartError
from tests.chart.rendering import DEMO, FETCHED, GROUPS, HUB, VALUE_SETS, Release, release

OPENSHIFT = VALUE_SETS["openshift"]
VOLUMES = {"configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim", "projected", "secret"}
"""Kinds of volumes that the SCC allows."""


def pods(manifests: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the specifications of all pods, including the test's pod."""
    found = [m["spec"]["template"]["spec"] for m in manifests if m["kind"] in ("Deployment", "StatefulSet")]
    return found + [m["spec"] for m in manifests if m["kind"] == "Pod"]


@pytest.mark.parametrize("name", [HUB, DEMO, FETCHED, GROUPS])
def test_restricted_pods_have_no_ids_of_their_own_and_write_to_volumes_alone(name: str):
    manifests = lint.render(VALUE_SETS[name], settings=["openshift=true"])
    assert len(pods(manifests)) >= 4
    for pod in pods(manifests):
        assert pod["securityContext"] == {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
        assert not pod.keys() & {"hostNetwork", "hostPID", "hostIPC"}
        for volume in pod.get("volumes", []):
            assert volume.keys() - {"name"} <= VOLUMES, volume
        for container in (*pod["containers"], *pod.get("initContainers", [])):
            security = container["securityContext"]
            assert not security.keys() & {"runAsUser", "runAsGroup", "privileged"}, container["name"]
            assert security["allowPrivilegeEscalation"] is False
            assert security["capabilities"] == {"drop": ["ALL"]}


def test_a_user_without_a_home_writes_to_directories_that_are_volumes():
    rendered = Release(lint.render(OPENSHIFT))
    for service in ("frontend", "enginecore", "coordinator"):
        volumes, env = rendered.volumes(service), rendered.env(service)
        writable = {path for path, mount in rendered.mounts(service).items() if "emptyDir" in volumes[mount["name"]]}
        assert rendered.container(service)["securityContext"]["readOnlyRootFilesystem"] is True
        assert env["HOME"]["value"] in writable
        for name in ("HF_HOME", "XDG_CACHE_HOME", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "CUDA_CACHE_PATH"):
            if name in env:
                assert any(env[name]["value"].startswith(path) for path in writable), (service, name)


def test_the_shared_secret_is_for_the_group_that_the_cluster_chooses():
    rendered = Release(lint.render(VALUE_SETS[GROUPS], settings=["openshift=true"]))
    assert rendered.volumes("enginecore")["parallel"]["secret"]["defaultMode"] == 0o440


def test_elsewhere_pods_have_ids():
    assert release(HUB).pod_spec("frontend")["securityContext"]["runAsUser"] == 10001


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            ["model.source=hostPath", "model.hostPath.path=/models"],
            "model.source is hostPath, but openshift is true, and the SCC",
        ),
        (
            ["model.source=oci", "model.oci.reference=example/model:1"],
            "model.source is oci, but openshift is true, and the SCC",
        ),
        (
            ["podSecurityContext.runAsUser=1234"],
            "podSecurityContext.runAsUser is 1234, but openshift is true, and the SCC",
        ),
        (["podSecurityContext.fsGroup=7"], "podSecurityContext.fsGroup is 7, but openshift is true"),
        (
            ["podSecurityContext.supplementalGroups={7}"],
            r"podSecurityContext.supplementalGroups is \[7\], but openshift",
        ),
        (
            ["frontend.extraVolumes[0].name=data", "frontend.extraVolumes[0].hostPath.path=/data"],
            "frontend.extraVolumes: data is of the kind hostPath, but openshift is true",
        ),
        (
            ["enginecore.extraVolumes[0].name=data", "enginecore.extraVolumes[0].image.reference=example/data:1"],
            "enginecore.extraVolumes: data is of the kind image, but openshift is true",
        ),
    ],
)
def test_what_the_cluster_would_refuse_or_the_chart_leave_out_is_refused_by_name(settings: list[str], said: str):
    model = ["model.hub.id="] if settings[0].startswith("model.") else []
    with pytest.raises(ChartError, match=said):
        lint.render(OPENSHIFT, settings=[*model, *settings], kube_version="1.35.0")
