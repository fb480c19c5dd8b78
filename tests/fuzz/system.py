"""The system under fire: coordinator, engine and frontend as processes, and what they hold."""

import asyncio
import contextlib
import json
import os
import re
import tempfile
import time
from pathlib import Path
from random import Random
from types import TracebackType
from typing import Any

import msgspec

from penstock.enginecore.v1 import messages_pb2 as engine_pb
from penstock.enginecore.v1 import service_pb2_grpc as engine_rpc
from penstock.inference.v1 import messages_pb2 as pb
from penstock.inference.v1 import service_pb2_grpc as rpc
from penstock_common.rpc.channel import make_channel
from tests.fakes.processes import Service, free_port
from tests.fuzz import probe

MODEL = Path(__file__).resolve().parents[2] / "examples" / "demo_model" / "penstock-tiny"
_WARM_PROMPTS = 10
_DEFECTS = re.compile(
    r"unexpected error|Traceback|Unexpected \[|\[error *\]|\[critical *\]|never awaited|never retrieved", re.I
)


class Held(msgspec.Struct, frozen=True):
    """What a process holds: memory in MiB, and numbers."""

    rss: int
    threads: int
    fds: int
    tasks: int


class _Probed(Service):
    """A service that is watched by the probe."""

    def __init__(self, module: str, **flags: object) -> None:
        super().__init__(module, **flags)
        self.service = module.removeprefix("penstock_")
        self._arguments.insert(0, self.module)
        self.module = probe.__name__


class System:
    """``async with System()``: everything answers when the block begins."""

    def __init__(self) -> None:
        self.http_port, self.admin_port = free_port(), free_port()
        self.coordinator = _Probed("penstock_coordinator", lease_seconds=2, restart_grace=1)
        self.engine = _Probed(
            "penstock_enginecore",
            model__path=MODEL,
            engine_id="engine-0",
            coordinator__address=self.coordinator.address,
            cache__kv_cache_memory="64MiB",
            executor__num_threads=1,
        )
        self.engine.add_flag("coordinator.advertise", self.engine.address)
        self.frontend = _Probed(
            "penstock_frontend",
            model__path=MODEL,
            coordinator__address=self.coordinator.address,
            admin__port=self.admin_port,
            http__host="127.0.0.1",
            http__port=self.http_port,
        )
        self._folder = tempfile.TemporaryDirectory()

    @property
    def services(self) -> list[_Probed]:
        """All of them."""
        return [self.coordinator, self.engine, self.frontend]

    @property
    def addresses(self) -> dict[str, str]:
        """host:port by the names that the RPCs have."""
        return {
            "coordinator": self.coordinator.address,
            "engine": self.engine.address,
            "frontend": self.frontend.address,
            "admin": f"127.0.0.1:{self.admin_port}",
        }

    async def __aenter__(self) -> "System":
        os.environ[probe.FILE] = f"{self._folder.name}/{{pid}}"
        self._stack = contextlib.AsyncExitStack()
        for service in self.services:
            await self._stack.enter_async_context(service)
        await asyncio.gather(*(service.serving() for service in self.services))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()
        self._folder.cleanup()

    async def answers(self) -> None:
        """Ask for a few tokens. Raises when the system does not give them within half a minute."""
        async with make_channel(self.frontend.address) as channel:
            request = pb.GenerateRequest(text="Once upon", sampling_params={"max_tokens": 3})  # type: ignore[arg-type]
            answer = [each async for each in rpc.InferenceServiceStub(channel).Generate(request, timeout=30)]
        assert sum(len(each.token_ids) for each in answer), "no tokens"

    async def warm_up(self) -> None:
        """Touch all of the KV cache, whose memory the system hands out only then."""
        rng = Random(1)
        async with make_channel(self.frontend.address) as channel:
            stub = rpc.InferenceServiceStub(channel)
            for _ in range(_WARM_PROMPTS):
                ids = pb.TokenIds(ids=[rng.randrange(6, 2048) for _ in range(1990)])
                request = pb.GenerateRequest(token_ids=ids, sampling_params={"max_tokens": 2})  # type: ignore[arg-type]
                async for _answer in stub.Generate(request, timeout=60):
                    pass

    async def until_idle(self, seconds: float = 30.0) -> list[str]:
        """Wait until nobody has a request. Returns what is left behind then."""
        until = time.monotonic() + seconds
        while (left := await self._left()) and time.monotonic() < until:
            await asyncio.sleep(0.2)
        return left

    async def _left(self) -> list[str]:
        async with make_channel(self.engine.address) as channel:
            info = await engine_rpc.EngineCoreServiceStub(channel).GetEngineInfo(engine_pb.GetEngineInfoRequest())
        stats = info.scheduler_stats
        left = {
            "running requests in the engine": stats.num_running_reqs,
            "waiting requests in the engine": stats.num_waiting_reqs,
            "KV cache in use": stats.kv_cache_usage,
            "live requests in the frontend": sum(await self.metric("penstock:requests_in_flight")),
        }
        return [f"{name}: {value:g}" for name, value in left.items() if value]

    async def metric(self, name: str) -> list[float]:
        """The values of the frontend's metric, one per set of labels."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.http_port)
        writer.write(b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        text = (await reader.read()).decode()
        writer.close()
        return [float(line.split()[-1]) for line in text.splitlines() if re.match(re.escape(name) + r"[{ ]", line)]

    def held(self) -> dict[str, Held]:
        """What each process holds now."""
        return {service.service: self._held(service) for service in self.services}

    def _held(self, service: _Probed) -> Held:
        proc = Path(f"/proc/{service.pid}")
        status = dict(line.split(":", 1) for line in (proc / "status").read_text().splitlines() if ":" in line)
        return Held(
            rss=int(status["VmRSS"].split()[0]) // 1024,
            threads=int(status["Threads"]),
            fds=len(list((proc / "fd").iterdir())),
            tasks=self._probed(service)[-1]["tasks"],
        )

    def blocks(self) -> dict[str, tuple[int, int, list[dict[str, Any]]]]:
        """By service: longest time that its loop was held, computing and by the clock, in ms; and what held it."""
        found = {}
        for service in self.services:
            lines = self._probed(service)
            blocks = [block for line in lines for block in line["blocks"]]
            found[service.service] = (
                max(line["longest_ms"] for line in lines),
                max(line["longest_wall_ms"] for line in lines),
                sorted(blocks, key=lambda block: -block["cpu_ms"]),
            )
        return found

    def _probed(self, service: _Probed) -> list[dict[str, Any]]:
        file = Path(os.environ[probe.FILE].format(pid=service.pid))
        return (
            [json.loads(line) for line in file.read_text().splitlines()]
            if file.exists()
            else [{"tasks": 0, "longest_ms": 0, "longest_wall_ms": 0, "blocks": []}]
        )

    def logs(self) -> dict[str, str]:
        """Everything that each has printed."""
        return {service.service: service.log() for service in self.services}

    def defects(self) -> list[str]:
        """Processes that died, and lines of the logs that speak of a defect of ours."""
        found = [f"the {service.service} has ended" for service in self.services if not service.alive]
        for service in self.services:
            lines = service.log().splitlines()
            at = [index for index, line in enumerate(lines) if _DEFECTS.search(line)]
            if at:
                found.append(f"{service.service}, {len(at)} lines of its log: " + "\n".join(lines[at[0] : at[0] + 40]))
        return found
