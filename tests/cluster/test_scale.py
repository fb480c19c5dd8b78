"""``penstock scale`` as in docs/guides/kubernetes.md: sets the number of engines under load, and refuses wrong numbers."""

import asyncio
import json

import pytest

from tests.cluster.conftest import NewRelease
from tests.cluster.load import Clients, Load, undisturbed
from tests.cluster.release import Release
from tests.cluster.terminal import Terminal
from tests.cluster.test_disruption import MAX_TOKENS, SLOW
from tests.cluster.values import MODEL, merged, oracle

ROLLED = {"enginecore": {"config": {"scheduler": {"max_num_seqs": 15}}}}
"""Change of a setting that replaces the engines' pods."""
BY_HAND = {"coordinator": {"kubernetes": {"scale": True}}}


def forwarded(release: Release, terminal: Terminal) -> None:
    """Forward the operators' port of a frontend."""
    deployment = f"deployment/{release.fullname}-frontend"
    terminal.forward(f"kubectl --namespace {release.namespace} port-forward {deployment} 50053")


def wanted(release: Release) -> int:
    """Return the desired number of engines."""
    deployment = json.loads(release.kubectl("get", f"deployment/{release.fullname}-enginecore", "-o", "json"))
    return int(deployment["spec"]["replicas"])


async def until_ready(release: Release, engines: int) -> None:
    """Wait until exactly this number of engines is ready."""
    async with asyncio.timeout(120):
        while len(release.pods("enginecore")) != engines or len(release.ready("enginecore")) != engines:
            await asyncio.sleep(0.5)


async def test_operators_scale_under_load(new_release: NewRelease, helm: str) -> None:
    release = new_release(helm=helm)
    values = oracle(merged(SLOW, BY_HAND))
    release.install(values)
    with Terminal(release) as terminal:
        forwarded(release, terminal)
        async with Clients(release.target(MODEL)) as clients:
            known = await undisturbed(clients, MAX_TOKENS)
            async with Load(clients, known, streams=4, max_tokens=MAX_TOKENS) as load:
                await load.calls(12)
                said = terminal.type("penstock scale 4")
                assert said == "pool default: 2 engines wanted before, 4 now\n"
                await until_ready(release, 4)
                await load.calls(12)
                await asyncio.to_thread(release.upgrade, merged(values, ROLLED))
                assert wanted(release) == 4
                assert terminal.type("penstock scale 1") == "pool default: 4 engines wanted before, 1 now\n"
                await until_ready(release, 1)
                await load.calls(24)
        assert load.wrong == []
        assert "101; it must be from 0 to 100" in terminal.type("penstock scale 101", status=1)
        assert "pools: default" in terminal.type("penstock scale --pool defalt 2", status=1)
        assert wanted(release) == 1


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"enginecore": {"autoscaling": {"mode": "hpa"}}, **BY_HAND}, "belongs to"),
        ({}, "kubernetes.deployments and kubernetes.leader_worker_sets are empty"),
    ],
    ids=["an-autoscaler", "nobody-was-given-it"],
)
def test_a_number_that_is_not_the_operators(new_release: NewRelease, values: dict[str, object], reason: str) -> None:
    release = new_release()
    release.install(oracle(values))
    before = wanted(release)
    with Terminal(release) as terminal:
        forwarded(release, terminal)
        assert reason in terminal.type("penstock scale 3", status=1)
    assert wanted(release) == before
