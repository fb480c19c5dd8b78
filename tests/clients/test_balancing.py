"""Several frontends behind one name: calls take turns, new frontends are found, and stopped ones get no more calls.

The client runs in a separate mount namespace, in which ``/etc/hosts`` contains the name. The addresses are loopback
addresses.
"""

import asyncio
import os
import shutil
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from tests.clients.running import Client, ended
from tests.fakes.frontends.fake_inference import FakeInference
from tests.fakes.network.ports import free_port
from tests.fakes.patience import PATIENCE

NAME = "frontends.penstock.test"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        os.geteuid() != 0 or shutil.which("unshare") is None,
        reason="names of a client's own need root and unshare (util-linux)",
    ),
]


class Frontends:
    """Frontends on different addresses with the same port. ``hosts`` is the client's /etc/hosts."""

    def __init__(self, folder: Path) -> None:
        self.hosts = folder / "hosts"
        self.port = free_port()
        self.servers: list[FakeInference] = []
        self._stack = AsyncExitStack()

    @property
    def address(self) -> str:
        """Return the address argument for the client."""
        return f"dns:///{NAME}:{self.port}"

    async def one(self, *, max_age: float = 1.0) -> FakeInference:
        """Start another frontend. ``max_age`` is the maximum age of its connections in seconds."""
        server = FakeInference(host=f"127.0.0.{len(self.servers) + 11}", port=self.port, max_age=max_age)
        await server.start()
        self._stack.push_async_callback(server.stop)
        self.servers.append(server)
        return server

    def name(self, *servers: FakeInference) -> None:
        """Make the name resolve to the addresses of ``servers``.

        The file is changed in place, because it is mounted in the client's namespace.
        """
        self.hosts.write_text("".join(f"{server.host} {NAME}\n" for server in servers) + "127.0.0.1 localhost\n")

    def counts(self) -> list[int]:
        """Return the number of calls of each frontend."""
        return [len(server.requests) for server in self.servers]

    async def until(self, *indices: int, more: int) -> None:
        """Wait until each frontend has received the given number of additional calls."""
        before = self.counts()
        async with asyncio.timeout(PATIENCE):
            while any(self.counts()[i] - before[i] < more for i in indices):
                await asyncio.sleep(0.02)

    async def close(self) -> None:
        """Stop all frontends."""
        await self._stack.aclose()


@pytest.fixture
async def frontends(tmp_path: Path) -> AsyncIterator[Frontends]:
    all_of_them = Frontends(tmp_path)
    yield all_of_them
    await all_of_them.close()


async def load(client: Client, frontends: Frontends) -> asyncio.subprocess.Process:
    """Run the client in a namespace with the name. The client makes calls until it is interrupted."""
    mount = f'mount --bind {frontends.hosts} /etc/hosts && exec "$@"'
    named = client.behind("unshare", "--mount", "sh", "-c", mount, "client")
    return await named.start(frontends.address, "load", "--at-once", "4", "--for", "600", "a b c")


async def stop(process: asyncio.subprocess.Process) -> None:
    """Interrupt the client, and check that no call has failed."""
    process.send_signal(signal.SIGINT)
    done = await ended(process)
    assert (done.code, done.err) == (130, "")
    assert ", failed: 0, " in done.out


async def test_all_addresses_of_a_name_are_called_in_turn(client: Client, frontends: Frontends) -> None:
    # Connections stay open, because a replaced connection would change the turns.
    frontends.name(*[await frontends.one(max_age=0.0) for _ in range(3)])
    process = await load(client, frontends)
    await frontends.until(0, 1, 2, more=10)
    before = frontends.counts()
    await frontends.until(0, more=50)
    had = [now - then for now, then in zip(frontends.counts(), before, strict=True)]
    await stop(process)
    assert max(had) <= 1.25 * min(had), had


async def test_a_frontend_that_leaves_is_left_before_it_refuses(client: Client, frontends: Frontends) -> None:
    first, second = await frontends.one(), await frontends.one()
    frontends.name(first, second)
    process = await load(client, frontends)
    await frontends.until(0, 1, more=5)
    await second.set_serving(False)
    async with asyncio.timeout(PATIENCE):
        while True:  # the client resolves the name again after a moment
            before = frontends.counts()
            await frontends.until(0, more=20)
            if frontends.counts()[1] == before[1]:
                break
    await second.set_serving(True)
    await frontends.until(1, more=5)
    await stop(process)


async def test_frontends_come_and_go_and_no_call_fails(client: Client, frontends: Frontends) -> None:
    first = [await frontends.one() for _ in range(2)]
    frontends.name(*first)
    process = await load(client, frontends)
    await frontends.until(0, 1, more=5)
    frontends.name(*first, await frontends.one(), await frontends.one())
    await frontends.until(0, 1, 2, 3, more=5)
    frontends.name(*frontends.servers[2:])
    for server in first:
        await server.set_serving(False)
    await frontends.until(2, 3, more=20)
    for server in first:
        await server.leave()
    await frontends.until(2, 3, more=20)
    await stop(process)
