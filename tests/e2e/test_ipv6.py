"""Services that listen, advertise and connect over IPv6 alone."""

import socket

import httpx
import pytest

from tests.e2e.conftest import DEMO_MODEL
from tests.fakes.systems.cluster import Cluster, read


def _has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


pytestmark = pytest.mark.skipif(not _has_ipv6(), reason="this machine has no IPv6 loopback address")


@pytest.mark.slow
async def test_services_find_each_other_and_answer() -> None:
    cluster = Cluster(DEMO_MODEL, engines=1, host="::1")
    (engine,) = cluster.engines
    # An address without a port, as in a pod: the server adds its own port.
    engine.add_flag("coordinator.advertise", "::1")
    async with cluster:
        answer = await read(cluster.generate("Once upon a time", max_tokens=5, ignore_eos=True))
        assert len(answer.token_ids) == 5
        async with httpx.AsyncClient(base_url=f"http://[::1]:{cluster.frontend.metrics_port}") as client:
            told = (await client.get("/cluster")).raise_for_status().json()
    assert [engine["address"] for engine in told["engines"]] == [f"[::1]:{engine.port}"]
