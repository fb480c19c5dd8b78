"""A Prometheus for one test, with real scrapes and rule evaluations every half second."""

import asyncio
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx
import pytest
import yaml

from tests.fakes.network.ports import free_port
from tests.fakes.patience import PATIENCE

PROGRAMS = Path(__file__).resolve().parents[2] / "build" / "cluster" / "bin"
PACE = "1s"
SHORTEST = 8
"""Minimum window in seconds: time for several scrapes on a busy machine."""


def program(name: str) -> Path:
    """Return the path of a program of Prometheus. Skips the test if the program is not built."""
    places = (PROGRAMS / name, PROGRAMS / "prometheus" / name)
    found = next((place for place in places if place.is_file()), None)
    if found is None:
        pytest.skip(f"{name} is not in build/cluster/bin: make cluster-tools builds it")
    return found


def hurried(rules: Mapping[str, list[dict[str, Any]]]) -> dict[str, list[dict[str, Any]]]:
    """Return the same rules with short windows for tests: seconds replace minutes, and alerts fire after three seconds."""

    def window(found: re.Match[str]) -> str:
        minutes = int(found[1])
        return f"[{minutes * 2 if minutes >= 30 else max(minutes, SHORTEST)}s]"

    changed: dict[str, list[dict[str, Any]]] = {}
    for group, of_group in rules.items():
        changed[group] = [
            rule | {"expr": re.sub(r"\[(\d+)m\]", window, rule["expr"])} | ({"for": "3s"} if "alert" in rule else {})
            for rule in of_group
        ]
    return changed


class Prometheus:
    """A Prometheus server: ``async with Prometheus(targets, rules)``. ``targets`` maps addresses (host:port) to the
    labels of their series.
    """

    def __init__(self, targets: Mapping[str, Mapping[str, str]], rules: Mapping[str, list[dict[str, Any]]]) -> None:
        self._program = program("prometheus")
        self._folder = tempfile.TemporaryDirectory()
        self._address = f"127.0.0.1:{free_port()}"
        self._write("rules.yml", {"groups": [{"name": name, "rules": found} for name, found in rules.items()]})
        scraped = [{"targets": [address], "labels": dict(labels)} for address, labels in targets.items()]
        self._write(
            "prometheus.yml",
            {
                "global": {"scrape_interval": PACE, "scrape_timeout": PACE, "evaluation_interval": PACE},
                "rule_files": ["rules.yml"],
                "scrape_configs": [{"job_name": "penstock", "static_configs": scraped}],
            },
        )

    def _write(self, name: str, what: object) -> None:
        (Path(self._folder.name) / name).write_text(yaml.safe_dump(what), encoding="utf-8")

    async def __aenter__(self) -> "Prometheus":
        folder = Path(self._folder.name)
        self._log = (folder / "log").open("wb")
        self._process = await asyncio.create_subprocess_exec(
            self._program,
            f"--config.file={folder / 'prometheus.yml'}",
            f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address={self._address}",
            stdout=self._log,
            stderr=self._log,
        )
        self._client = httpx.AsyncClient(base_url=f"http://{self._address}/api/v1/", timeout=30)
        async with asyncio.timeout(PATIENCE):
            while not await self._answers():
                await asyncio.sleep(0.1)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._client.aclose()
        if self._process.returncode is None:
            self._process.terminate()
        await self._process.wait()
        self._log.close()
        self._folder.cleanup()

    async def _answers(self) -> bool:
        if self._process.returncode is not None:
            raise RuntimeError(f"prometheus ended:\n{(Path(self._folder.name) / 'log').read_text()}")
        try:
            return (await self._client.get("status/runtimeinfo")).is_success
        except httpx.TransportError:
            return False

    async def query(self, promql: str) -> list[dict[str, Any]]:
        """Return the current series of a query. Raises ValueError with Prometheus's error message."""
        answer = (await self._client.get("query", params={"query": promql})).json()
        if answer["status"] != "success":
            raise ValueError(f"{promql}: {answer['error']}")
        found: list[dict[str, Any]] = answer["data"]["result"]
        return found

    async def firing(self) -> set[str]:
        """Return the names of the firing alerts."""
        alerts = (await self._client.get("alerts")).json()["data"]["alerts"]
        return {alert["labels"]["alertname"] for alert in alerts if alert["state"] == "firing"}

    async def until_firing(self, names: set[str]) -> None:
        """Wait until each of these alerts has fired. Raises TimeoutError with the alerts that did not."""
        seen: set[str] = set()
        try:
            async with asyncio.timeout(PATIENCE / 3):
                while not names <= seen:
                    seen |= await self.firing()
                    await asyncio.sleep(0.2)
        except TimeoutError:
            raise TimeoutError(f"these did not fire: {sorted(names - seen)}; these did: {sorted(seen)}") from None

    async def until_quiet(self) -> None:
        """Wait until no alert fires."""
        async with asyncio.timeout(PATIENCE):
            while await self.firing():
                await asyncio.sleep(0.2)
