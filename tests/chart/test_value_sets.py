"""Properties of the chart that every set of values must have."""

import base64
import re
from pathlib import Path

import pytest

from charts import lint
from tests.chart.rendering import VALUE_SETS, release

every_value_set = pytest.mark.parametrize("name", sorted(VALUE_SETS))


@every_value_set
def test_manifests_are_what_the_oldest_and_the_newest_kubernetes_accept(name: str):
    versions = lint.kube_versions(VALUE_SETS[name])
    for version in (versions[0], versions[-1]):
        for manifest in release(name, kube_version=version).manifests:
            lint.validate(manifest, version)


def test_a_value_set_is_checked_from_the_version_on_that_it_needs(tmp_path: Path):
    values = tmp_path / "values.yaml"
    for text, versions in (
        ("# Needs Kubernetes 1.36: x", ["1.36", "1.37"]),
        ("# Needs Kubernetes 1.35: x", ["1.35", "1.36", "1.37"]),
        ("# Whatever.", list(lint.KUBE_VERSIONS)),
    ):
        values.write_text(text)
        assert lint.kube_versions(values) == versions


def test_the_lint_says_which_value_set_is_wrong(tmp_path: Path):
    values = tmp_path / "values.yaml"
    values.write_text("enginecore: {replica: 2}\n")
    problems = lint.check(values)
    assert len(problems) == 1 + len(lint.KUBE_VERSIONS)
    assert all("Additional property replica is not allowed" in problem for problem in problems)


def test_a_wrong_field_in_a_manifest_is_found():
    service = {**release().one("Service", "coordinator"), "spec": {"port": 1}}
    with pytest.raises(lint.ChartError, match=r"Service demo-penstock-coordinator: spec: .*'port' was unexpected"):
        lint.validate(service, lint.KUBE_VERSIONS[0])


def test_a_key_that_stands_twice_is_found(tmp_path: Path):
    template = tmp_path / "templates" / "twice.yaml"
    template.parent.mkdir()
    template.write_text("kind: Twice\nmetadata:\n  name: a\n  name: b\n")
    (tmp_path / "Chart.yaml").write_text("apiVersion: v2\nname: twice\nversion: 0.1.0\n")
    with pytest.raises(lint.ChartError, match="a manifest has name twice in one place"):
        lint.render(chart=tmp_path)


@every_value_set
def test_services_select_the_pods_of_their_component_or_pool_alone(name: str):
    rendered = release(name)
    pods = {component: rendered.pod(component)["metadata"]["labels"] for component in rendered.components()}
    for service in rendered.all("Service"):
        selector = service["spec"]["selector"]
        (selected,) = [c for c in pods if selector.items() <= pods[c].items()]
        assert selected in service["metadata"]["name"]


@every_value_set
def test_workloads_select_the_pods_that_they_make(name: str):
    rendered = release(name)
    for component in rendered.components():
        if rendered.workload(component)["kind"] == "LeaderWorkerSet":
            continue  # this object's controller selects pods by its own labels
        selector = rendered.workload(component)["spec"]["selector"]["matchLabels"]
        assert selector.items() <= rendered.pod(component)["metadata"]["labels"].items()


@every_value_set
def test_service_ports_lead_to_ports_of_the_container(name: str):
    rendered = release(name)
    pods = {component: rendered.pod(component)["metadata"]["labels"] for component in rendered.components()}
    for service in rendered.all("Service"):
        (component,) = [c for c in pods if service["spec"]["selector"].items() <= pods[c].items()]
        containers = rendered.pod_spec(component)["containers"]
        ports = {port["name"]: port["containerPort"] for container in containers for port in container["ports"]}
        for port in service["spec"]["ports"]:
            assert port["targetPort"] in ports
            if service["spec"].get("clusterIP") == "None":
                assert port["port"] == ports[port["targetPort"]]


@every_value_set
def test_names_are_valid_and_distinct(name: str):
    names = [(m["kind"], m["metadata"]["name"]) for m in release(name).manifests]
    assert len(set(names)) == len(names)
    for _, metadata_name in names:
        assert re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", metadata_name)
        assert len(metadata_name) <= 63


@every_value_set
def test_no_secret_is_written_into_a_manifest(name: str):
    rendered = release(name)
    # The secret that the chart generates for the engines' ports is in no other manifest.
    made = [secret["data"]["secret"] for secret in rendered.all("Secret")]
    assert len(made) <= 1
    for manifest in rendered.manifests:
        texts = [made, [base64.b64decode(each).decode() for each in made]] if manifest["kind"] != "Secret" else []
        assert not any(text in str(manifest) for each in texts for text in each)
    for config_map in rendered.all("ConfigMap"):
        text = str(config_map["data"]).replace("secret_file: /etc/penstock-parallel/secret", "")
        assert not re.search(r"token:|password|secret|hf_", text, re.IGNORECASE)
    for component in rendered.components():
        token = rendered.env(component).get("HF_TOKEN", {})
        assert "value" not in token


@every_value_set
def test_pods_have_the_least_rights(name: str):
    rendered = release(name)
    for component in rendered.components():
        mounted = component == "coordinator" and bool(rendered.all("Role"))
        assert rendered.pod_spec(component)["automountServiceAccountToken"] is mounted
        assert rendered.container(component)["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }


RESTRICTED_VOLUMES = {
    "configMap",
    "csi",
    "downwardAPI",
    "emptyDir",
    "ephemeral",
    "image",
    "persistentVolumeClaim",
    "projected",
    "secret",
}


@every_value_set
def test_pods_are_admitted_under_the_restricted_pod_security_standard(name: str):
    rendered = release(name)
    for component in rendered.components():
        pod = rendered.pod_spec(component)
        assert not {"hostNetwork", "hostPID", "hostIPC"} & pod.keys()
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"].get("runAsUser") != 0
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert {key for volume in pod["volumes"] for key in volume if key != "name"} <= RESTRICTED_VOLUMES
        for container in [*pod["containers"], *rendered.before(component).values()]:
            own = container["securityContext"]
            assert own["allowPrivilegeEscalation"] is False
            assert own["capabilities"] == {"drop": ["ALL"]}
            assert not {"privileged", "procMount", "runAsNonRoot", "seccompProfile"} & own.keys()
            assert not [port for port in container.get("ports", []) if "hostPort" in port]


@every_value_set
def test_no_service_variables_that_the_services_would_read_as_configuration(name: str):
    for component in release(name).components():
        assert release(name).pod_spec(component)["enableServiceLinks"] is False


@every_value_set
def test_every_mount_has_its_volume_and_every_volume_its_mount(name: str):
    rendered = release(name)
    for component in rendered.components():
        mounted = [mount["name"] for mount in rendered.container(component)["volumeMounts"]]
        assert sorted(mounted) == sorted(rendered.volumes(component))
        for container in rendered.before(component).values():
            assert {mount["name"] for mount in container.get("volumeMounts", [])} <= rendered.volumes(component).keys()
        assert len(rendered.mounts(component)) == len(mounted)
        assert rendered.mounts(component)["/tmp"] == {"name": "tmp", "mountPath": "/tmp"}
        assert "emptyDir" in rendered.volumes(component)["tmp"]
