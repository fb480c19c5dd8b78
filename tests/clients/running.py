"""Processes of clients, started like a user does."""

import asyncio
import os
from typing import NamedTuple

from tests.fakes.patience import PATIENCE


class Ended(NamedTuple):
    """Result of a client process."""

    code: int | None
    out: str
    err: str


class Client:
    """A client. ``command`` is its command line without arguments."""

    def __init__(self, command: list[str]) -> None:
        self._command = command

    def behind(self, *command: str) -> "Client":
        """Return the same client, started through another program."""
        return Client([*command, *self._command])

    async def start(self, address: str, *arguments: str, key: str = "") -> asyncio.subprocess.Process:
        """Start the client with a command (``arguments[0]``) and the command's options and texts."""
        name, *rest = arguments
        env = {**os.environ, "PENSTOCK_API_KEY": key}
        if not key:
            del env["PENSTOCK_API_KEY"]
        return await asyncio.create_subprocess_exec(
            *self._command,
            name,
            "--address",
            address,
            *rest,
            env=env,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )

    async def run(self, address: str, *arguments: str, key: str = "") -> Ended:
        """Run the client until it ends."""
        return await ended(await self.start(address, *arguments, key=key))


async def ended(process: asyncio.subprocess.Process) -> Ended:
    """Wait until the process ends."""
    out, err = await asyncio.wait_for(process.communicate(), PATIENCE)
    return Ended(process.returncode, out.decode(), err.decode())


async def read(process: asyncio.subprocess.Process, text: str) -> None:
    """Wait until the process has printed exactly ``text``."""
    assert process.stdout is not None
    expected = text.encode()
    assert await asyncio.wait_for(process.stdout.readexactly(len(expected)), PATIENCE) == expected
