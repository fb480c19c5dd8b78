"""Media in the soak test: small caches, accidents of media workers, and checks for leaked media."""

import asyncio
import contextlib
import os
import random
import re
import signal
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx

from tests.chaos.media import forget, media_ones
from tests.chaos.requests import Request
from tests.fakes.multimodal_models import save_multimodal_model
from tests.fakes.network.ports import free_port
from tests.fakes.patience import PATIENCE
from tests.soak.cluster import COUNT, SoakCluster
from tests.soak.havoc import Accidents
from tests.soak.memory import LOCK, files_of, owners_of
from tests.soak.watch import children_of, gauge, metrics

WORKERS = 2
STORE_BYTES = 2 * 1024 * 1024
"""Size of a frontend's media store. The store has space for twenty items of 100 kB, so items are evicted and processed
again.
"""
RECEIVER_BYTES = 1024 * 1024
ENCODER_ROWS = 128
IN_FLIGHT_BYTES = 32 * 1024 * 1024
"""Limit on the media bytes of all requests: twice the most that the streams can use. A leak soon causes refusals."""
_WORKER = re.compile(r"media[.-]worker")


class MediaCluster(SoakCluster):
    """A cluster of a tiny multimodal model, with small caches and a separate folder for temporary files."""

    fresh = 0.25

    def __init__(self, family: str, **flags: Any) -> None:
        self._models = tempfile.TemporaryDirectory()
        self._family = family
        model = Path(self._models.name) / family
        save_multimodal_model(family, model)
        self.admin_port = free_port()
        self._temporary = tempfile.TemporaryDirectory()
        self.temporary = Path(self._temporary.name)
        self._owners: set[str] = set()
        self._left_behind: list[str] = []
        """Files that still existed after all services had ended, as text."""
        frontend: dict[str, Any] = {
            "admin__port": self.admin_port,
            "media__workers": WORKERS,
            "media__store_bytes": STORE_BYTES,
            "limits__max_media_bytes_in_flight": IN_FLIGHT_BYTES,
        }
        engine: dict[str, Any] = {
            "multimodal__receiver_cache_bytes": RECEIVER_BYTES,
            "multimodal__encoder_cache_size": ENCODER_ROWS,
            "scheduler__max_num_batched_tokens": 96,
        }
        super().__init__(model, frontend_flags=frontend, **engine, **flags)
        for service in self.services:
            service.environment["TMPDIR"] = self._temporary.name

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        workers = self.workers()
        await super().__aexit__(kind, error, trace)
        if there := [pid for pid in workers if _WORKER.search(name_of(pid))]:
            self._left_behind.append(f"{len(there)} media workers")
        for what, found in (("temporary files", self.temporary_files()), ("files in shared memory", self.segments())):
            if found:
                self._left_behind.append(f"{what}: {', '.join(found)}")
        self._models.cleanup()
        self._temporary.cleanup()

    @property
    def wrong(self) -> list[str]:
        """See ``SoakCluster``."""
        return [f"when all had ended: {left}" for left in self._left_behind]

    def requests(self, tokens: int) -> list[Request]:
        """Return all requests to send. Half of them have media."""
        return super().requests(tokens) + media_ones(self._family, COUNT, tokens)

    def workers(self) -> list[int]:
        """Process ids of the frontend's media workers."""
        return [pid for pid in children_of(self.frontend.pid) if _WORKER.search(name_of(pid))]

    def segments(self) -> list[str]:
        """Return the frontend's files in shared memory, without its lock while it runs."""
        if self.frontend.alive:
            self._owners |= owners_of(self.frontend)
        names = [path.name for path in files_of(self._owners)]
        return [name for name in names if not (self.frontend.alive and LOCK.fullmatch(name))]

    async def reset(self) -> None:
        """Clear the media caches and encoder caches of all engines."""
        await forget(self.admin_port)

    def accidents(self, rng: random.Random) -> Accidents:
        """Return the accidents by name, each with its weight, for ``Havoc``."""

        async def kill_worker() -> None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(rng.choice(self.workers()), signal.SIGKILL)
            async with asyncio.timeout(PATIENCE):
                while len(self.workers()) < WORKERS:
                    await asyncio.sleep(0.05)

        return {"media worker killed": (3, kill_worker), "media forgotten": (3, self.reset)}

    async def left(self) -> str:
        """Describe media resources that are in use although there are no requests and the caches are empty. Empty if there
        are none.
        """
        await self.reset()
        if len(pids := self.workers()) != WORKERS:
            return f"frontend: {len(pids)} media workers instead of {WORKERS}"
        if files := self.temporary_files():
            return f"{len(files)} temporary files: {', '.join(files)}"
        if segments := self.segments():
            return f"frontend: {len(segments)} segments of shared memory"
        async with httpx.AsyncClient(verify=False, trust_env=False) as http:
            text = await metrics(http, self.frontend)
            if queued := gauge(text, "penstock:media_queued"):
                return f"frontend: {queued:.0f} items wait for a media worker"
            if (stored := gauge(text, "penstock:media_store_bytes")) > STORE_BYTES:
                return f"frontend: {stored:.0f} bytes in the store, which may have {STORE_BYTES}"
            for number, engine in enumerate(self.engines):
                text = await metrics(http, engine)
                for name in ("receiver_cache_bytes", "encoder_cache_usage", "encoder_pending_embeds"):
                    if held := gauge(text, f"penstock:{name}"):
                        return f"engine-{number}: {name} is {held:g} after a reset"
        return ""

    def temporary_files(self) -> list[str]:
        """Return the paths of the services' temporary files."""
        return sorted(str(path.relative_to(self.temporary)) for path in self.temporary.rglob("*"))


def name_of(pid: int) -> str:
    """Return the command line of a process, or the title that the process has set. Empty if the process has ended."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    return ""
