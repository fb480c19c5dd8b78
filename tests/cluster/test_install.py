"""``helm install`` and ``helm uninstall`` as in the README. The namespace is empty before and after."""

import re

import pytest

from tests.cluster.conftest import NewRelease
from tests.cluster.load import Clients, undisturbed
from tests.cluster.release import HelmError, Release
from tests.cluster.terminal import Terminal
from tests.cluster.values import MODEL, cpu_profile, oracle

LEFT_BY_KUBERNETES = {"kube-root-ca.crt", "default"}


def commands(notes: str) -> list[str]:
    """Return the commands in the notes, in order."""
    whole = notes.replace("\\\n", " ")
    return [line.strip() for line in whole.splitlines() if re.match("  (kubectl|helm|penstock|grpcurl|curl) ", line)]


def follow(notes: str, release: Release) -> None:
    """Run the commands as printed; commands for another terminal run in the background. Raises AssertionError with a
    command's output.
    """
    typed = commands(notes)
    assert [line.split()[0] for line in typed[-6:-3]] == ["penstock", "grpcurl", "curl"]
    with Terminal(release) as terminal:
        for command in typed:
            if " port-forward " in command:
                terminal.forward(command)
            else:
                assert terminal.type(command).strip(), command


async def test_the_cpu_profile_gets_ready_answers_and_leaves_nothing(new_release: NewRelease, helm: str) -> None:
    release = new_release(helm=helm)
    notes = release.install(cpu_profile())
    assert len(release.ready("frontend")) == 1
    assert len(release.ready("enginecore")) == 1
    assert len(release.ready("coordinator")) == 1
    assert not [pod for pod in release.pods("enginecore") if pod["status"]["containerStatuses"][0]["restartCount"]]
    follow(notes, release)
    async with Clients(release.target(MODEL)) as clients:
        known = await undisturbed(clients, max_tokens=16)
    assert all(len(tokens) == 16 for tokens in known.values())
    release.uninstall()
    # Helm waits only for the pods' owners, not for the pods.
    release.kubectl("wait", "--for=delete", "pods", "--all", "--timeout=300s")
    everything = release.cluster.kubectl("api-resources", "--namespaced", "--verbs=list", "-o", "name").split()
    kinds = [kind for kind in everything if not re.match(r"events|.*metrics\.k8s\.io", kind)]
    left = release.kubectl("get", ",".join(kinds), "-o", "name").split()
    assert {name.partition("/")[2] for name in left} <= LEFT_BY_KUBERNETES


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"enginecore": {"image": {"tag": "no-such"}}}, "no-such"),
        ({"frontend": {"edge": {"apiKeysSecretName": "no-such"}}}, 'secret "no-such" not found'),
        ({"enginecore": {"resources": {"requests": {"cpu": "99"}}}}, "Insufficient cpu"),
        ({"enginecore": {"gpu": {"count": 1}, "replicas": 4}}, "Insufficient nvidia.com/gpu"),
        ({"model": {"image": {"path": "/no/such"}}}, "model.path is '/no/such': there is no such directory"),
    ],
    ids=["image", "secret", "cpu", "gpu", "model"],
)
def test_what_keeps_pods_from_starting_is_said(new_release: NewRelease, changes: dict[str, object], said: str) -> None:
    release = new_release()
    with pytest.raises(HelmError) as refused:
        release.install(oracle(changes), "--timeout", "45s")
    assert said in str(refused.value)


def test_a_typo_is_refused_before_anything_is_made(new_release: NewRelease) -> None:
    release = new_release()
    with pytest.raises(HelmError, match="replica"):
        release.install(oracle({"enginecore": {"replica": 3}}))
    assert not release.objects("deployments")
