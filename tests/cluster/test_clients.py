"""Clients of every language while frontends are added and removed.

No call fails, and new frontends get an even share of the calls. ``make clients-test`` builds the clients.
"""

import asyncio
import json
import re
import signal

import pytest

from tests.clients.languages import BUILD, LANGUAGES
from tests.cluster.conftest import NewRelease
from tests.cluster.release import Release
from tests.cluster.values import MODEL, merged, oracle

STREAMS = 32
"""Number of concurrent calls of each language."""
AGE = 10
"""Seconds after which a frontend closes a connection, so that clients reconnect."""
WINDOW = 15.0
"""Seconds for which calls per frontend are counted."""
SHARE = 0.25
VALUES = {
    "frontend": {"replicas": 3, "config": {"server": {"max_connection_age": AGE}}},
    "enginecore": {"replicas": 2, "extraEnv": [{"name": "ORACLE_STEP_SECONDS", "value": "0.1"}]},
}
SUMMARY = re.compile(r"calls: (\d+), failed: (\d+), ")


def languages() -> dict[str, list[str]]:
    """Return the command line of each available client."""
    built = {language.name: BUILD / f"{language.name}.built" for language in LANGUAGES}
    return {name: json.loads(path.read_text())["command"] for name, path in built.items() if path.exists()}


class Callers:
    """A client of each language. The clients make calls until they are stopped."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._running: dict[str, asyncio.subprocess.Process] = {}

    async def start(self) -> None:
        """Start the clients."""
        options = ["--at-once", str(STREAMS), "--for", "3600", "--max-tokens", "10", "--seed", "1", "Once upon a time"]
        for language, command in languages().items():
            self._running[language] = await asyncio.create_subprocess_exec(
                *command,
                "load",
                "--address",
                self._address,
                *options,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
            )

    async def stop(self) -> dict[str, tuple[int, int, str]]:
        """Stop the clients. Returns, by language, the number of calls, the number of failed calls and their error
        output.
        """
        for process in self._running.values():
            process.send_signal(signal.SIGINT)
        ends = await asyncio.gather(*(process.communicate() for process in self._running.values()))
        told = {}
        for language, (out, err) in zip(self._running, ends, strict=True):
            found = SUMMARY.match(out.decode())
            calls, failed = map(int, found.groups()) if found else (0, -1)
            told[language] = calls, failed, err.decode()[-300:]
        return told


async def shares(release: Release) -> list[float]:
    """Count each frontend's answers for ``WINDOW`` seconds. Returns the counts relative to an even distribution."""
    before = await asyncio.to_thread(release.served)
    await asyncio.sleep(WINDOW)
    after = await asyncio.to_thread(release.served)
    had = [after[name] - before[name] for name in after]
    return [round(count * len(had) / sum(had), 2) for count in had]


@pytest.mark.skipif(not languages(), reason="no clients are built (make clients-test)")
@pytest.mark.parametrize("by", ["headless", "service"])
async def test_no_call_fails_while_frontends_come_and_go(new_release: NewRelease, by: str) -> None:
    release = new_release()
    values = oracle(VALUES)
    release.install(values)
    target = release.target(MODEL)
    callers = Callers(f"dns:///{target.headless}:50051" if by == "headless" else f"{target.service}:50051")
    await callers.start()
    try:
        await asyncio.sleep(AGE)
        await asyncio.to_thread(release.upgrade, merged(values, {"frontend": {"replicas": 5}}))
        await asyncio.sleep(1.5 * AGE)
        even = await shares(release)
        await asyncio.to_thread(release.upgrade, merged(values, {"frontend": {"replicas": 2}}))
        deployment = f"deployment/{release.fullname}-frontend"
        await asyncio.to_thread(release.kubectl, "rollout", "restart", deployment)
        await asyncio.to_thread(release.kubectl, "rollout", "status", deployment, "--timeout=240s")
        await asyncio.sleep(AGE)
    finally:
        told = await callers.stop()
    print(f"{by}: {told}; shares of five: {even}")
    assert all(calls and not failed and not said for calls, failed, said in told.values()), told
    if by == "headless":  # with one Service address, a language has only one connection
        assert all(1 - SHARE <= share <= 1 + SHARE for share in even), even
