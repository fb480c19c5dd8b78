"""The StatefulSet of a group follows its ranks."""

from collections.abc import AsyncIterator

import pytest
from prometheus_client import CollectorRegistry

from penstock_common.errors import FailedPrecondition, InvalidArgument
from penstock_common.types.cluster import ClusterView
from penstock_common.types.data_parallel import GroupView, PoolGroup, RankGroup
from penstock_coordinator.config import KubernetesConfig
from penstock_coordinator.kubernetes.api import KubernetesApi
from penstock_coordinator.kubernetes.errors import Failures
from penstock_coordinator.kubernetes.replicas import GroupPods, Replicas, pods_of
from tests.fakes.network.kubernetes_api import Server, account_at

CONFIG = KubernetesConfig(stateful_sets={"default": "engines"}, ranks_per_pod={"default": 2}, max_replicas=8)
PATH = "/apis/apps/v1/namespaces/serving/statefulsets/engines/scale"


def group(target: int, *engines: str) -> PoolGroup:
    view = GroupView(RankGroup(int(bool(engines)), tuple(f"{engine}#1" for engine in engines)))
    return PoolGroup(model="m", pool="default", view=view, target_size=target)


@pytest.mark.parametrize(
    ("target", "engines", "per_pod", "pods"),
    [
        (4, ("e-0", "e-1"), 1, 4),
        (2, ("e-0", "e-1", "e-2", "e-10"), 1, 11),  # e-10 has not left yet
        (4, ("e-0-0", "e-0-1", "e-1-0", "e-1-1", "e-2-0"), 2, 3),
        (4, ("e-0-0", "e-0-1", "e-1-1"), 2, 2),
        (2, ("other-7", "e-x"), 1, 2),  # names of pods that do not belong to this StatefulSet
    ],
)
def test_pods_are_those_of_the_ranks_to_be_and_of_those_that_have_not_left(
    target: int, engines: tuple[str, ...], per_pod: int, pods: int
) -> None:
    assert pods_of(group(target, *engines), "e", per_pod) == pods


class Bench:
    def __init__(self, server: Server, api: KubernetesApi, registry: CollectorRegistry) -> None:
        self.server, self.now = server, 0.0
        self.view: ClusterView | None = None
        self.failures = Failures(registry, "serving", lambda: self.now)
        self._pods = GroupPods(CONFIG, api, self.failures, view=lambda: self.view)

    async def look(self, of: PoolGroup) -> list[str]:
        """The methods of the requests that a look at ``of`` takes."""
        self.view, seen = ClusterView(groups=(of,)), len(self.server.requests)
        await self._pods.write_due()
        assert {path for _, path, _ in self.server.requests[seen:]} <= {PATH}
        return [method for method, _, _ in self.server.requests[seen:]]


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    async with Server() as server:
        api = KubernetesApi(account_at(server.url))
        yield Bench(server, api, CollectorRegistry())
        await api.close()


FOUR = ("engines-0-0", "engines-0-1", "engines-1-0", "engines-1-1")
SIX = (*FOUR, "engines-2-0", "engines-2-1")


async def test_pods_come_with_the_wish_and_go_when_their_ranks_have_left(bench: Bench) -> None:
    assert await bench.look(group(4)) == []  # no rank has registered yet, so the chart's number of replicas stays
    assert await bench.look(group(4, *FOUR)) == ["GET"]  # the number of replicas is right
    assert await bench.look(group(4, *FOUR)) == []
    assert await bench.look(group(6, *FOUR)) == ["GET", "PATCH"]
    assert bench.server.replicas == 3
    assert await bench.look(group(4, *SIX)) == []
    assert await bench.look(group(4, *FOUR)) == ["GET", "PATCH"]
    assert bench.server.replicas == 2


async def test_failed_calls_are_retried_later(bench: Bench) -> None:
    bench.server.status = 403
    assert await bench.look(group(6, *FOUR)) == ["GET"]
    assert await bench.look(group(6, *FOUR)) == []
    bench.server.status, bench.now = 200, 1.0
    assert await bench.look(group(6, *FOUR)) == ["GET", "PATCH"]


async def test_a_number_of_ranks_has_the_bounds_of_the_pool_and_fills_pods(bench: Bench) -> None:
    replicas = Replicas(CONFIG, None, bench.failures)
    replicas.check_ranks("default", 8)
    replicas.check_ranks("without", 99)
    with pytest.raises(InvalidArgument, match="replicas is 10; it must be from 0 to 8"):
        replicas.check_ranks("default", 10)
    with pytest.raises(InvalidArgument, match="replicas is 3; each pod of pool 'default' has 2 ranks, so it must be a"):
        replicas.check_ranks("default", 3)
    with pytest.raises(FailedPrecondition, match="pool 'default' has no ranks yet") as e:
        await replicas.scale("", 4)
    assert e.value.reason == "NO_GROUP"
