"""The sockets of processes, as the system lists them."""

import asyncio
import os
import socket
import sys

import pytest

from tests.fakes.network.sockets import connections, descendants, listening


@pytest.mark.parametrize(("family", "host"), [(socket.AF_INET, "127.0.0.2"), (socket.AF_INET6, "::1")])
def test_a_listener_and_both_ends_of_its_connection_are_found(family: socket.AddressFamily, host: str) -> None:
    with socket.create_server((host, 0), family=family) as listener:
        port = listener.getsockname()[1]
        assert (host, port) in listening([os.getpid()])
        with socket.create_connection((host, port)) as client, listener.accept()[0]:
            end = "{}:{}".format(*client.getsockname()[:2])
            assert {f"{end} - {host}:{port}", f"{host}:{port} - {end}"} <= connections(os.getpid())
    assert (host, port) not in listening([os.getpid()])
    assert not any(f"{host}:{port}" in each for each in connections(os.getpid()))


async def test_the_processes_of_a_process_are_its_descendants() -> None:
    inner = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'print(1, flush=True); input()'])"
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", inner, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    await process.stdout.readline()
    found = descendants(process.pid)
    assert found[0] == process.pid
    assert len(found) == 2
    await process.communicate(b"\n")
    assert descendants(process.pid) == [process.pid]
    assert listening([process.pid]) == []
