"""Real autoscalers with engines under load: the number of engines fits the load, and no call fails."""

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.cluster.conftest import NewRelease
from tests.cluster.load import Clients, Load, undisturbed
from tests.cluster.release import Release
from tests.cluster.system.autoscalers import install_adapter, install_keda, install_prometheus
from tests.cluster.system.cluster import Cluster
from tests.cluster.tools.build import ROOT
from tests.cluster.values import MODEL, merged, oracle
from tests.cluster.watch import Watch, turns

SLOTS = 16
MAX_TOKENS = 100
PLOTS = ROOT / "plots"
MANY, FEW = 21, 8
"""Number of streams of each of three kinds of client. ghz adds one stream.

3 x 21 + 1 = 64 streams fill four engines of 16 slots. 3 x 8 + 1 = 25 streams are a load of 0.8 for two engines.
"""
PATIENCE = 240.0


@pytest.fixture(scope="module")
def metrics(cluster: Cluster) -> None:
    """Install a Prometheus that scrapes the pods, and the adapter that serves Prometheus's series to the HPA."""
    install_prometheus(cluster)
    install_adapter(cluster)


@pytest.fixture(scope="module")
def keda(cluster: Cluster) -> None:
    """Install KEDA, which calls the coordinators directly."""
    install_keda(cluster)


def scaled(mode: str, **changes: Any) -> dict[str, Any]:
    """Return values with one to four engines. The engines have few slots, and a step takes 50 ms."""
    own = {
        "config": {"scheduler": {"max_num_seqs": SLOTS}},
        "extraEnv": [{"name": "ORACLE_STEP_SECONDS", "value": "0.05"}],
        "autoscaling": {
            "mode": mode,
            "minReplicas": 1,
            "maxReplicas": 4,
            "scaleDownStabilizationSeconds": 15,
            **({"idleSeconds": 10} if mode == "keda" else {}),
        },
    }
    return oracle({"enginecore": merged(own, changes)})


async def until(what: str, true: Callable[[], bool]) -> None:
    """Wait until ``true`` returns True. Raises AssertionError with ``what`` after ``PATIENCE`` seconds."""
    deadline = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < deadline, f"{what}: not within {PATIENCE:.0f} s"
        await asyncio.sleep(0.5)


async def rise_and_fall(release: Release, plot: str) -> None:
    """Run 64 streams, then 25 streams. The number of engines goes from one to four, then to two.

    Every call's answer is the same as without scaling.
    """
    async with Clients(release.target(MODEL)) as clients:
        known = await undisturbed(clients, MAX_TOKENS)
        with Watch(release, f"deployment/{release.fullname}-enginecore") as watch:
            try:
                await until("one engine", lambda: bool(watch.samples) and watch.samples[-1].wanted == 1)
                async with Load(clients, known, streams=MANY, max_tokens=MAX_TOKENS) as load:
                    watch.streams, risen = 3 * MANY, watch.now
                    await until("four engines", lambda: watch.samples[-1].ready == 4)
                    await asyncio.sleep(30)  # all slots are in use and no request waits: no engine is removed
                    assert set(watch.changes(risen)[-1:]) == {4}
                    load.resize(FEW)
                    watch.streams, fallen = 3 * FEW, watch.now
                    await until("two engines", lambda: watch.samples[-1].ready == 2)
                    await asyncio.sleep(30)
            finally:
                watch.plot(PLOTS / plot)
    assert load.wrong == []
    assert turns([number for number in watch.changes(risen) if number]) <= 1
    assert watch.changes(fallen)[-1] == 2
    assert watch.taken == 2
    assert watch.dearer == []


@pytest.mark.usefixtures("metrics")
async def test_the_hpa_follows_the_load(new_release: NewRelease) -> None:
    release = new_release()
    release.install(scaled("hpa"))
    await rise_and_fall(release, "hpa.png")


async def wake(release: Release) -> None:
    """Send ten requests while there are no engines, and kill the coordinator. Each request is answered once."""
    async with Clients(release.target(MODEL)) as clients:
        known = await undisturbed(clients, MAX_TOKENS)
        with Watch(release, f"deployment/{release.fullname}-enginecore") as watch:
            await until(
                "no engine",
                lambda: bool(watch.samples) and watch.samples[-1].wanted == 0 and not release.pods("enginecore"),
            )
            began = time.monotonic()
            prompts = list(known) + list(known)[:4]
            calls = [asyncio.create_task(clients.send("plain", prompt, MAX_TOKENS)) for prompt in prompts]
            [coordinator] = release.pods("coordinator")
            release.kubectl("delete", "pod", coordinator["metadata"]["name"], "--grace-period=0", "--force")
            answers = await asyncio.gather(*calls)
            seconds = time.monotonic() - began
            print(f"{len(answers)} requests sent to nothing: the last one answered after {seconds:.1f} s")
    assert [answer.error for answer in answers] == [""] * 10
    assert all(answer.tokens == known[answer.prompt] for answer in answers)


@pytest.mark.usefixtures("metrics")
async def test_the_hpa_goes_to_zero_and_back(new_release: NewRelease, cluster: Cluster) -> None:
    if cluster.control_plane.version < (1, 37):
        pytest.skip("a HorizontalPodAutoscaler goes to zero from Kubernetes 1.37 on")
    names = {"load": "penstock_coordinator_pool_load", "kv": "penstock_coordinator_pool_kv_cache_usage"}
    external = {"metrics": "External", "loadMetric": names["load"], "kvMetric": names["kv"]}
    release = new_release()
    release.install(scaled("hpa", autoscaling={"minReplicas": 0, "hpa": external}))
    await wake(release)


@pytest.mark.usefixtures("keda")
async def test_keda_follows_the_load(new_release: NewRelease) -> None:
    release = new_release()
    release.install(scaled("keda"))
    await rise_and_fall(release, "keda.png")


@pytest.mark.usefixtures("keda")
async def test_keda_goes_to_zero_and_back(new_release: NewRelease) -> None:
    release = new_release()
    release.install(scaled("keda", autoscaling={"minReplicas": 0}))
    await wake(release)
