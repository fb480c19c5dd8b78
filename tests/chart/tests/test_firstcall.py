"""tests/firstcall.yaml: the pod of ``helm test``, with the credentials and certificates that a frontend's client needs."""

from typing import Any

from penstock_frontend.rpc import first_call
from tests.chart.rendering import BARE, EXPOSED, HUB, release


def pod(name: str, *settings: str) -> dict[str, Any]:
    return release(name, *settings).one("Pod", "test")


def container(name: str, *settings: str) -> dict[str, Any]:
    (found,) = pod(name, *settings)["spec"]["containers"]
    return found


def test_it_can_be_left_out():
    assert not release(HUB, "test.enabled=false").all("Pod")


def test_it_is_a_hook_that_is_gone_once_it_has_succeeded():
    annotations = pod(HUB)["metadata"]["annotations"]
    assert annotations["helm.sh/hook"] == "test"
    assert annotations["helm.sh/hook-delete-policy"] == "before-hook-creation,hook-succeeded"


def test_it_runs_a_module_of_the_frontends_image_with_arguments_that_this_takes():
    rendered = container(HUB, "test.maxTokens=3")
    assert rendered["image"] == release(HUB).container("frontend")["image"]
    assert rendered["command"] == ["python", "-m", first_call.__name__]
    options = first_call.parse(rendered["args"])
    assert options.grpc == "demo-penstock-frontend.serving.svc:50051"
    assert options.http == "demo-penstock-frontend.serving.svc:8000"
    assert (options.prompt, options.max_tokens, options.timeout) == ("Once upon a time", 3, 240)
    assert (options.certificate, options.key) == ("", "")


def test_it_calls_the_ports_of_the_service():
    assert first_call.parse(container(BARE)["args"]).grpc.endswith(":443")


def test_it_belongs_to_no_service_and_has_no_rights():
    spec = pod(HUB)["spec"]
    for service in release(HUB).all("Service"):
        assert not service["spec"]["selector"].items() <= pod(HUB)["metadata"]["labels"].items()
    assert (spec["restartPolicy"], spec["automountServiceAccountToken"]) == ("Never", False)
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container(HUB)["securityContext"] == release(HUB).container("frontend")["securityContext"]
    assert "volumes" not in spec
    assert "volumeMounts" not in container(HUB)


def test_it_has_the_certificate_without_its_key_and_the_key_that_it_is_given():
    volumes = {volume["name"]: volume["secret"] for volume in pod(EXPOSED)["spec"]["volumes"]}
    assert volumes["edge"]["secretName"] == "demo-penstock-edge-tls"
    assert volumes["edge"]["items"] == [{"key": "tls.crt", "path": "tls.crt"}]
    assert volumes["key"] == {"secretName": "a-key", "items": [{"key": "key", "path": "key"}]}
    mounts = {mount["name"]: mount["mountPath"] for mount in container(EXPOSED)["volumeMounts"]}
    arguments = dict(argument.removeprefix("--").split("=", 1) for argument in container(EXPOSED)["args"])
    assert arguments["certificate"] == f"{mounts['edge']}/tls.crt"
    assert arguments["key-file"] == f"{mounts['key']}/key"


def test_its_certificate_may_come_from_an_existing_secret():
    (volume,) = pod(HUB, "frontend.edge.tlsSecretName=edge-cert")["spec"]["volumes"]
    assert volume["secret"]["secretName"] == "edge-cert"
