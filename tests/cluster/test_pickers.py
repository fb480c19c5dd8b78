"""Frontends as an InferencePool: a real endpoint picker chooses frontends by their metrics, for a real Envoy."""

import asyncio
import json
import urllib.request

import openai
import pytest

from tests.cluster.conftest import NewRelease
from tests.cluster.load import PROMPTS, Clients, Load, Target, undisturbed
from tests.cluster.release import Release
from tests.cluster.system.cluster import Cluster
from tests.cluster.system.definitions import define
from tests.cluster.system.pickers import METRICS_PORT, PORT, install_picker, service
from tests.cluster.system.programs import until
from tests.cluster.test_disruption import MAX_TOKENS, SLOW, in_background
from tests.cluster.tools.build import PROGRAMS
from tests.cluster.values import MODEL, merged, oracle

SLOTS = 2
"""Maximum number of concurrently running requests of a busy engine. Further requests are queued."""
BUSY = 12
ASKED = 16
QUEUE = "inference_pool_average_queue_size"
PREFIX = "Once upon a time " * 40

pytestmark = pytest.mark.skipif(
    not (PROGRAMS / "endpoint-picker" / "epp").exists(), reason="the endpoint picker is not built: make cluster-tools"
)


@pytest.fixture(scope="module", autouse=True)
def kinds(cluster: Cluster) -> None:
    """Define the kind InferencePool."""
    define(cluster)


def pooled(pool: str, **enginecore: object) -> dict[str, object]:
    """Return values with two frontends from which the picker of ``pool`` chooses."""
    picker = {"enabled": True, "endpointPicker": {"name": service(pool)}}
    return oracle(merged(SLOW, {"frontend": {"inferencePool": picker}, "enginecore": enginecore}))


def through(address: str, release: Release) -> Target:
    """Yield an HTTP client that goes through the picker's Envoy."""
    return Target(service=address, headless=release.target(MODEL).headless, model=MODEL, http_port=PORT)


async def test_the_frontends_of_a_pool_are_called_and_replaced_without_a_failed_call(new_release: NewRelease) -> None:
    release = new_release()
    pool = f"{release.fullname}-frontend"
    values = pooled(pool)
    release.install(values)
    address = install_picker(release, pool)
    async with Clients(release.target(MODEL)) as clients:
        known = await undisturbed(clients, MAX_TOKENS)
    async with Clients(through(address, release)) as clients:
        before = release.served()
        async with Load(clients, known, streams=6, max_tokens=MAX_TOKENS, kinds=["openai"]) as load:
            await load.calls(24)
            assert all(count > before[name] for name, count in release.served().items())
            await in_background(release.upgrade, merged(values, {"frontend": {"podAnnotations": {"a": "b"}}}))
            await load.calls(24)
    assert load.wrong == []


async def ask(address: str, prompts: list[str]) -> None:
    """Send one short completion for each prompt, one after the other."""
    async with openai.AsyncOpenAI(base_url=f"http://{address}:{PORT}/v1", api_key="none", max_retries=0) as client:
        for prompt in prompts:
            await client.completions.create(model=MODEL, prompt=prompt, max_tokens=1)


async def test_the_release_with_the_shorter_queue_is_picked(new_release: NewRelease) -> None:
    pool = "both"
    values = pooled(pool, replicas=1, config={"scheduler": {"max_num_seqs": SLOTS}})
    releases = [new_release("first"), new_release("second")]
    for release in releases:
        release.install(values)
    first, second = releases
    share(first, pool)
    address = install_picker(first, pool)
    until("all endpoints known", lambda: told(address, "inference_pool_ready_pods") == 2 * len(releases))
    for busy, idle in ((first, second), (second, first)):
        async with (
            Clients(busy.target(MODEL)) as clients,
            Load(clients, {}, streams=BUSY, max_tokens=MAX_TOKENS // 2, kinds=["plain"]),
        ):
            await asyncio.to_thread(
                until, "a queue", lambda: told(address, QUEUE) >= (BUSY - SLOTS) / len(releases) - 1
            )
            before = sum(idle.served().values())
            await ask(address, [f"{number} bears" for number in range(ASKED)])
            answered = sum(idle.served().values()) - before
        assert answered == ASKED


async def test_a_prefix_that_came_before_goes_where_it_went(new_release: NewRelease) -> None:
    release = new_release()
    pool = f"{release.fullname}-frontend"
    release.install(pooled(pool))
    address = install_picker(release, pool)
    before = release.served()
    await ask(address, [f"{PREFIX}{prompt}" for prompt in PROMPTS * 2])
    counts = [count - before[name] for name, count in release.served().items()]
    assert sorted(counts) == [0, 2 * len(PROMPTS)]


def share(release: Release, pool: str) -> None:
    """Create an InferencePool of all frontends in the namespace. Its other fields equal those of the chart's pool."""
    own = json.loads(release.kubectl("get", "inferencepool", f"{release.fullname}-frontend", "-o", "json"))
    own["metadata"] = {"name": pool, "namespace": release.namespace}
    own["spec"]["selector"]["matchLabels"] = {"app.kubernetes.io/component": "frontend"}
    own.pop("status", None)
    release.cluster.control_plane.apply(json.dumps(own))


def told(address: str, metric: str) -> float:
    """Return the value of the picker's metric for its pool."""
    with urllib.request.urlopen(f"http://{address}:{METRICS_PORT}/metrics", timeout=10) as page:
        lines = page.read().decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(metric + "{"))
