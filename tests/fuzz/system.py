"""The attacked system: coordinator, two engines and a frontend as processes, and their resources."""

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
from tests.fakes.network.ports import free_port
from tests.fakes.processes import KEPT, Service
from tests.fuzz import probe
from tests.fuzz.media import names
from tests.fuzz.media.decoders import decoders
from tests.fuzz.media.hosts import Hosts
from tests.fuzz.media.limits import ENGINE_FLAGS, STORE_BYTES, WORKERS, frontend_flags, left_by, segments_of
from tests.fuzz.variants import NAME, Variant

_WARM_PROMPTS = 16
_DECODERS = "media workers"
"""Row name for the media workers: memory of the largest worker, and number of workers."""


class Held(msgspec.Struct, frozen=True):
    """Resources of a process: memory in MiB, and counts."""

    rss: int = 0
    threads: int = 0
    fds: int = 0
    tasks: int = 0

    @property
    def amounts(self) -> tuple[int, int, int, int]:
        """Return all resources."""
        return self.rss, self.threads, self.fds, self.tasks


class Probed(Service):
    """A service with the probe."""

    def __init__(self, module: str, name: str = "", **flags: object) -> None:
        super().__init__(module, **flags)
        self.service = name or module.removeprefix("penstock_")
        self._arguments.insert(0, self.module)
        self.module = probe.__name__

    def memory(self, name: str, unit: int = 1024) -> int:
        """Return a memory value of the process from /proc, in MiB; 0 if the process has ended."""
        return _status(self.pid, name, unit)

    def more_log(self, seen: int) -> bytes:
        """Return its output after the first ``seen`` bytes, up to the last complete line."""
        with self._log.open("rb") as file:
            file.seek(seen)
            return file.read().rpartition(b"\n")[0]

    def forget_peak(self) -> None:
        """Reset the peak memory (VmHWM) to the current value."""
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            Path(f"/proc/{self.pid}/clear_refs").write_text("5")

    def cpu(self) -> float:
        """Return the CPU seconds of all threads of the process."""
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
            return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        return 0.0


def _status(pid: int, name: str, unit: int) -> int:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) // unit
    return 0


class System:
    """The system: ``async with System(variant, hosts)``. All services answer when the block begins.

    ``hosts`` are the media hosts.
    """

    def __init__(self, variant: Variant, hosts: Hosts | None = None) -> None:
        self.variant = variant
        self._hosts = hosts
        self.http_port, self.admin_port = free_port(), free_port()
        self._folder, self._temporary = tempfile.TemporaryDirectory(), tempfile.TemporaryDirectory()
        model = Path(self._folder.name, NAME)
        model.mkdir()
        variant.save(model)
        self.coordinator = Probed("penstock_coordinator", lease_seconds=10, restart_grace=1)
        self.engines = [self._engine(f"engine-{number}", model) for number in range(2)]
        self.frontend = self._frontend("frontend", model, self.http_port, self.admin_port)
        if variant.media:
            self.frontend.environment[names.VARIABLE] = "1"
        for service in self.services:
            service.environment["TMPDIR"] = self._temporary.name

    def _engine(self, name: str, model: Path) -> Probed:
        """Start an engine. There are two, so that failed requests are retried as in a real system."""
        engine = Probed(
            "penstock_enginecore",
            name,
            model__path=model,
            engine_id=name,
            coordinator__address=self.coordinator.address,
            cache__kv_cache_memory="64MiB",
            executor__num_threads=1,
            # Seconds of CPU time, so that hostile grammars are refused in time also on a busy machine.
            structured_output__compile_timeout=2,
            **(ENGINE_FLAGS if self.variant.media else {}),
            **self.variant.flags,
        )
        engine.add_flag("coordinator.advertise", engine.address)
        return engine

    def _frontend(self, name: str, model: Path, http_port: int, admin_port: int, **flags: object) -> Probed:
        """Start a frontend for the engines."""
        media = frontend_flags(self.variant, self._hosts.port) if self.variant.media and self._hosts is not None else {}
        return Probed(
            "penstock_frontend",
            name,
            model__path=model,
            # Without a parser, all tools would be refused, because the template renders no tools.
            model__tool_parser="hermes",
            coordinator__address=self.coordinator.address,
            admin__port=admin_port,
            http__host="127.0.0.1",
            http__port=http_port,
            # The defaults exceed the allowed memory peak of this test.
            limits__max_message_bytes_in_flight="128MiB",
            limits__max_answer_bytes_in_flight="128MiB",
            **KEPT,
            **media,
            **flags,
        )

    @property
    def services(self) -> list[Probed]:
        """Return all services."""
        return [self.coordinator, *self.engines, self.frontend]

    @property
    def addresses(self) -> dict[str, str]:
        """Return host:port by the port names of RPCs."""
        return {
            "coordinator": self.coordinator.address,
            "engine": self.engines[0].address,
            "frontend": self.frontend.address,
            "admin": f"127.0.0.1:{self.admin_port}",
        }

    async def __aenter__(self) -> "System":
        os.environ[probe.FILE] = f"{self._folder.name}/{{pid}}"
        self._stack = contextlib.AsyncExitStack()
        for service in self.services:
            await self._stack.enter_async_context(service)
        try:
            await asyncio.gather(*(service.serving() for service in self.services))
            self.temporary = self.temporary_files()
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()
        self._folder.cleanup()
        self._temporary.cleanup()

    async def answers(self) -> None:
        """Send a small request. Raises if there is no answer within a minute."""
        async with make_channel(self.frontend.address) as channel:
            stub = rpc.InferenceServiceStub(channel)
            if self.variant.pools:
                await stub.Embed(pb.EmbedRequest(inputs=[pb.PoolingInput(text="Once")]), timeout=60)
                return
            request = pb.GenerateRequest(text="Once upon", sampling_params={"max_tokens": 3})  # type: ignore[arg-type]
            answer = [each async for each in stub.Generate(request, timeout=60)]
        assert sum(len(each.token_ids) for each in answer), "no tokens"

    async def warm_up(self) -> None:
        """Use all blocks of the KV caches, because the operating system allocates the memory on first use."""
        rng = Random(1)
        async with make_channel(self.frontend.address) as channel:
            stub = rpc.InferenceServiceStub(channel)

            async def ask() -> None:
                ids = pb.TokenIds(ids=[rng.randrange(6, self.variant.vocab_size) for _ in range(1990)])
                if self.variant.pools:
                    await stub.Embed(pb.EmbedRequest(inputs=[pb.PoolingInput(token_ids=ids)]), timeout=120)
                    return
                request = pb.GenerateRequest(token_ids=ids, sampling_params={"max_tokens": 2})  # type: ignore[arg-type]
                async for _answer in stub.Generate(request, timeout=120):
                    pass

            count = (
                len(self.engines) if self.variant.pools else _WARM_PROMPTS
            )  # pooling models may have no cache to fill
            await asyncio.gather(*(ask() for _ in range(count)))

    async def until_idle(self, seconds: float = 30.0) -> list[str]:
        """Wait until no process has a request. Return the leaked resources."""
        until = time.monotonic() + seconds
        while (left := await self._left()) and time.monotonic() < until:
            await asyncio.sleep(0.2)
        return left

    async def _left(self) -> list[str]:
        left = {"live requests in the frontend": sum(await self.metric("penstock:requests_in_flight"))}
        for engine in self.engines:
            async with make_channel(engine.address) as channel:
                info = await engine_rpc.EngineCoreServiceStub(channel).GetEngineInfo(engine_pb.GetEngineInfoRequest())
            stats = info.scheduler_stats
            left |= {
                f"running requests in {engine.service}": stats.num_running_reqs,
                f"waiting requests in {engine.service}": stats.num_waiting_reqs,
                f"KV cache in use in {engine.service}": stats.kv_cache_usage,
            }
            if self.variant.media:
                left |= left_by(stats.media, engine.service)
        if self.variant.media:
            left |= await self._left_of_media()
        return [f"{name}: {value:g}" for name, value in left.items() if value]

    async def _left_of_media(self) -> dict[str, float]:
        stored = sum(await self.metric("penstock:media_store_bytes"))
        return {
            "media in the queue": sum(await self.metric("penstock:media_queued")),
            "bytes in the store, beyond its size": max(0.0, stored - STORE_BYTES),
            "media workers too many or too few": len(decoders(self.frontend.pid)) - WORKERS,
            "segments of shared memory": len(segments_of(self.frontend.pid)),
            "connections to hosts of media": self._hosts.num_open if self._hosts is not None else 0,
        }

    def temporary_files(self) -> set[str]:
        """Return the temporary files of the services."""
        return {str(path) for path in Path(self._temporary.name).rglob("*") if not path.is_dir()}

    def led(self) -> list[str]:
        """Return the requests that the private host got since the last call."""
        if self._hosts is None:
            return []
        found, self._hosts.led = self._hosts.led, []
        return found

    async def metric(self, name: str) -> list[float]:
        """Return the values of a frontend's metric, one per set of labels."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.http_port)
        writer.write(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        text = (await reader.read()).decode()
        writer.close()
        return [float(line.split()[-1]) for line in text.splitlines() if re.match(re.escape(name) + r"[{ ]", line)]

    def held(self) -> dict[str, Held]:
        """Return the current resources of each process."""
        found = {service.service: self._held(service) for service in self.services}
        if self.variant.media:
            sizes = [_status(pid, "VmRSS", 1024) for pid in decoders(self.frontend.pid)]
            found[_DECODERS] = Held(rss=max(sizes, default=0), threads=len(sizes))
        return found

    def _held(self, service: Probed) -> Held:
        return Held(
            rss=service.memory("VmRSS"),
            threads=service.memory("Threads", unit=1),
            fds=len(list(Path(f"/proc/{service.pid}/fd").iterdir())),
            tasks=self._probed(service)[-1]["tasks"],
        )

    def blocks(self) -> dict[str, tuple[int, int, list[dict[str, Any]]]]:
        """Return the longest block of each service's loop in ms, as CPU time and as elapsed time, with the cause."""
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

    def holds(self, service: Probed) -> list[dict[str, Any]]:
        """Return all recorded blocks of the service's event loop."""
        return [block for line in self._probed(service) for block in line["blocks"]]

    def _probed(self, service: Probed) -> list[dict[str, Any]]:
        file = Path(os.environ[probe.FILE].format(pid=service.pid))
        return (
            [json.loads(line) for line in file.read_text().splitlines()]
            if file.exists()
            else [{"tasks": 0, "longest_ms": 0, "longest_wall_ms": 0, "blocks": []}]
        )

    def logs(self) -> dict[str, str]:
        """Return the output of each service."""
        return {service.service: service.log() for service in self.services}
