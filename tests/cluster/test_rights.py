"""Rights of the coordinator's account, according to the API server: exactly the rights in the chart's README."""

import itertools
import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.cluster.conftest import HELMS, NewRelease
from tests.cluster.release import Release
from tests.cluster.system.cluster import Cluster
from tests.cluster.values import merged, oracle

VERBS = ("get", "list", "watch", "create", "update", "patch", "delete", "deletecollection")
EVERYBODYS = {
    *(("create", name) for name in ("selfsubjectaccessreviews", "selfsubjectrulesreviews", "selfsubjectreviews")),
    *((verb, "clustertrustbundles") for verb in ("get", "list", "watch")),
}
"""Rights of every account: to query its own rights, and to read the cluster's certificate authorities."""


def scaled(**coordinator: object) -> dict[str, object]:
    """Return values for engines that an HPA scales, so that the coordinator writes deletion costs."""
    return oracle({"enginecore": {"autoscaling": {"mode": "hpa"}}, "coordinator": coordinator})


def account(release: Release) -> str:
    """Return the user name of the coordinator's account in the API server."""
    return f"system:serviceaccount:{release.namespace}:{release.fullname}-coordinator"


def allowed(release: Release, namespace: str) -> set[tuple[str, str]]:
    """Return all pairs of verb and resource that the account may use in a namespace."""
    resources = release.cluster.kubectl("api-resources", "--no-headers", "-o", "name").split()
    resources += ["deployments.apps/scale", "pods/exec", "pods/eviction", "pods/log", "nodes/proxy"]
    checks = [
        {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SubjectAccessReview",
            "spec": {
                "user": account(release),
                "groups": [
                    "system:serviceaccounts",
                    f"system:serviceaccounts:{release.namespace}",
                    "system:authenticated",
                ],
                "resourceAttributes": attributes(verb, name, namespace),
            },
        }
        for verb, name in itertools.product(VERBS, resources)
    ]
    listed = {"apiVersion": "v1", "kind": "List", "items": checks}
    printed = release.cluster.kubectl("create", "-f", "-", "-o", "json", stdin=json.dumps(listed))
    found = set()
    for answer in documents(printed):
        asked = answer["spec"]["resourceAttributes"]
        if answer["status"]["allowed"]:
            resource = "/".join(filter(None, [asked["resource"], asked.get("subresource")]))
            found.add((asked["verb"], resource))
    return found - EVERYBODYS


def documents(printed: str) -> Iterator[dict[str, Any]]:
    """Yield concatenated JSON documents one by one."""
    decoder, at = json.JSONDecoder(), 0
    while at < len(printed.rstrip()):
        document, at = decoder.raw_decode(printed, at)
        yield document
        at += len(printed[at:]) - len(printed[at:].lstrip())


def attributes(verb: str, name: str, namespace: str) -> dict[str, str]:
    """Return the resource attributes for an access review, for example of ``deployments.apps/scale``."""
    full, _, subresource = name.partition("/")
    resource, _, group = full.partition(".")
    return {"verb": verb, "group": group, "resource": resource, "subresource": subresource, "namespace": namespace}


def test_the_coordinator_may_patch_pods_and_nothing_else(new_release: NewRelease) -> None:
    release = new_release()
    release.install(scaled())
    assert allowed(release, release.namespace) == {("patch", "pods")}
    assert allowed(release, "kube-system") == set()


def test_without_autoscaling_it_has_no_account(new_release: NewRelease) -> None:
    release = new_release()
    release.install(oracle())
    assert not release.objects("serviceaccounts,roles,rolebindings")
    policies = release.cluster.kubectl("get", "validatingadmissionpolicies", "-o", "name")
    assert release.namespace not in policies


@pytest.fixture(scope="module")
def watched(cluster: Cluster) -> Iterator[Release]:
    """Yield one release for the tests of all patches. The patches do not affect each other."""
    release = Release(cluster, str(HELMS["3"]), "demo", "patches")
    release.install(merged(scaled(), {"frontend": {"replicas": 1}}))
    yield release
    release.remove()


COST = "controller.kubernetes.io/pod-deletion-cost"


@pytest.mark.parametrize(
    ("component", "patch", "said"),
    [
        (
            "enginecore",
            {"spec": {"containers": [{"name": "enginecore", "image": "evil:1"}]}},
            "only an annotation of a pod",
        ),
        ("enginecore", {"metadata": {"labels": {"a": "b"}}}, "only an annotation of a pod"),
        ("enginecore", {"metadata": {"annotations": {"a": "b"}}}, "only the annotation"),
        ("enginecore", {"metadata": {"annotations": {COST: "much"}}}, "pod-deletion-cost"),
        ("frontend", {"metadata": {"annotations": {COST: "1"}}}, "of its own release"),
        ("enginecore", {"metadata": {"annotations": {COST: "1"}}}, ""),
    ],
    ids=["image", "label", "annotation", "no number", "no engine", "deletion cost"],
)
def test_a_patch_of_a_pod_is_its_deletion_cost_alone(
    watched: Release, component: str, patch: dict[str, object], said: str
) -> None:
    pod = watched.pods(component)[0]["metadata"]["name"]
    path = f"/api/v1/namespaces/{watched.namespace}/pods/{pod}"
    status, answer = watched.cluster.patch(path, patch, user=account(watched))
    assert (status, said in answer["message"]) == (422, True) if said else status == 200, answer
