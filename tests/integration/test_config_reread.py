"""Services whose config file Kubernetes replaces: they apply the settings that can change, and continue to run."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import yaml

from penstock.inference.v1 import service_pb2_grpc
from penstock_common.rpc.channel import make_channel
from tests.fakes.frontends.frontend_server import make_request
from tests.fakes.patience import PATIENCE
from tests.fakes.processes import Service
from tests.fakes.systems.cluster_members import address_of, running

pytestmark = pytest.mark.slow

MODEL = {"path": str(Path(__file__).resolve().parents[2] / "examples" / "demo_model" / "penstock-tiny")}
LOG = {"format": "json", "level": "warning"}
MODULES = {
    "coordinator": "penstock_coordinator",
    "enginecore": "tests.fakes.engines.oracle_service",
    "frontend": "penstock_frontend",
}
CONFIGS: dict[str, dict[str, Any]] = {
    "coordinator": {},
    "enginecore": {"model": MODEL | {"device": "cpu"}},
    "frontend": {"model": MODEL},
}


class Mounted:
    """A ConfigMap mounted into a service's pod: the file is a link into the directory that ``..data`` points to."""

    def __init__(self, folder: Path, config: dict[str, Any]) -> None:
        self._folder = folder
        self._number = 0
        folder.mkdir()
        self.swap(config)
        self.file = folder / "config.yaml"
        self.file.symlink_to("..data/config.yaml")

    def swap(self, config: dict[str, Any]) -> None:
        """Replace the file as the kubelet does: write a new directory and rename the new ``..data`` link over the old
        one.
        """
        self._number += 1
        version = self._folder / f"..version_{self._number}"
        version.mkdir()
        (version / "config.yaml").write_text(yaml.safe_dump(config))
        (self._folder / "..data_tmp").symlink_to(version.name)
        (self._folder / "..data_tmp").replace(self._folder / "..data")


class Followed:
    """A service that reads its configuration from a mounted ConfigMap."""

    def __init__(self, component: str, folder: Path, **config: Any) -> None:
        self.config = CONFIGS[component] | {"log": LOG} | config
        self.mounted = Mounted(folder / component, self.config)
        flags: dict[str, Any] = {}
        if component == "frontend":
            flags = {"server__max_connection_age": 0, "http__port": -1, "admin__port": 0}
        self.service = Service(MODULES[component], config=self.mounted.file, **flags)

    def change(self, **sections: Any) -> None:
        self.config = self.config | sections
        self.mounted.swap(self.config)

    def lines(self, event: str) -> list[dict[str, Any]]:
        """Return the log lines of an event."""
        lines = [json.loads(line) for line in self.service.log().splitlines() if line.startswith("{")]
        return [line for line in lines if line["event"] == event]

    async def until(self, event: str, count: int = 1) -> list[dict[str, Any]]:
        """Wait until the event was logged ``count`` times."""
        async with asyncio.timeout(PATIENCE):
            while len(found := self.lines(event)) < count:
                assert self.service.alive, self.service.log()
                await asyncio.sleep(0.05)
        return found


@contextlib.asynccontextmanager
async def system(tmp_path: Path, component: str, **config: Any) -> AsyncIterator[Followed]:
    """Yield the service together with the services that it needs."""
    async with contextlib.AsyncExitStack() as stack:
        if component == "frontend":
            engine = Followed("enginecore", tmp_path)
            await stack.enter_async_context(engine.service)
            await engine.service.serving()
            config["engines"] = [engine.service.address]
        elif component == "enginecore":
            coordinator = await stack.enter_async_context(running())
            config["coordinator"] = {"address": address_of(coordinator)}
        followed = Followed(component, tmp_path, **config)
        await stack.enter_async_context(followed.service)
        await followed.service.serving()
        yield followed


@pytest.mark.parametrize("component", MODULES)
async def test_a_service_takes_another_log_level_and_goes_on(component: str, tmp_path: Path) -> None:
    async with system(tmp_path, component) as followed:
        pid = followed.service.pid
        followed.change(log=LOG | {"level": "info"})
        [line] = await followed.until("applied the settings that changed in the configuration file")
        assert line["settings"] == ["log.level"]
        followed.change(log=LOG | {"level": "info"}, server={"max_concurrent_streams": 7})
        [line] = await followed.until(
            "settings changed in the configuration file, but take effect only after a restart of this service"
        )
        assert (line["level"], line["settings"]) == ("warning", ["server.max_concurrent_streams"])
        followed.change(log=LOG | {"level": "loud"})
        [line] = await followed.until(
            "config: the changed file cannot be used, so the service keeps the previous content"
        )
        assert "log.level is 'loud'; known: debug, info, warning, error" in line["problem"]
        followed.change(log=LOG | {"level": "info"}, server={})
        await followed.until("config: read the changed file", 2)
        assert followed.service.pid == pid
        assert await followed.service.stop() == 0
        ended = {"coordinator": "coordinator stopped", "enginecore": "engine stopped", "frontend": "frontend stopped"}
        assert followed.lines(ended[component]), "at info, by a logger that has been used before"


async def sequences(stub: service_pb2_grpc.InferenceServiceStub, n: int) -> str:
    """Return the result of a request for ``n`` sequences."""
    try:
        async for _ in stub.Generate(make_request(max_tokens=2, n=n), timeout=PATIENCE):
            pass
    except grpc.aio.AioRpcError as e:
        return e.details() or ""
    return "OK"


async def test_a_frontend_takes_other_limits_and_weights_while_it_serves(tmp_path: Path) -> None:
    config: dict[str, Any] = {"limits": {"max_n": 1}, "log": LOG | {"level": "info"}}
    async with system(tmp_path, "frontend", **config) as frontend, make_channel(frontend.service.address) as channel:
        stub = service_pb2_grpc.InferenceServiceStub(channel)
        assert "sampling_params.n is 2; it must be from 1 to 1" in await sequences(stub, 2)
        frontend.change(
            limits={"max_n": 2, "max_tenant_requests": 1},
            fairness={"weights": {"gold": 2.0}},
            log=LOG | {"level": "info", "requests": True},
        )
        [line] = await frontend.until("applied the settings that changed in the configuration file")
        assert line["settings"] == [
            "limits.max_tenant_requests",
            "limits.max_n",
            "fairness.weights",
            "log.requests",
        ]
        assert "limits.max_tenant_requests is 1" in await sequences(stub, 2)
        frontend.change(limits={"max_n": 2})
        await frontend.until("applied the settings that changed in the configuration file", 2)
        assert await sequences(stub, 2) == "OK"
        await frontend.until("request finished")
