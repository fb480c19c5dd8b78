"""Random operator calls without a break: loads, reloads in place, unloads and pins."""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Awaitable, Sequence
from pathlib import Path
from typing import Any

import grpc

from penstock.admin.v1 import messages_pb2 as pb
from penstock_common.errors import RequestFailed
from penstock_common.rpc.status import from_rpc_error
from tests.soak.lora.contents import Content
from tests.soak.lora.names import Names

GIVES_UP, GIVES_UP_WITHIN = 0.1, 0.05
"""Fraction of loads that the operator cancels, and the maximum seconds before it cancels."""
NOBODY = "nobody"


class Operator:
    """Changes the meanings of the ``own`` names, one at a time, until ``end`` is called.

    An adapter is loaded from its directory, or through the name's symbolic link, which the operator first points to the
    adapter.

    Attributes:
        counts: Number of changes by kind, and of refusals.
        problems: Violations, as text.
    """

    def __init__(
        self,
        admin: Any,
        names: Names,
        own: Sequence[str],
        contents: Sequence[Content],
        links: Path,
        *,
        pause: float,
        seed: int,
    ) -> None:
        """Prepare an operator.

        Args:
            pause: Mean seconds between two changes.
        """
        self._admin = admin
        self._names = names
        self._own = own
        self._contents = contents
        self._links = links
        self._pause = pause
        self._rng = random.Random(seed)
        self._over = False
        self._pinned: set[str] = set()
        self.counts: Counter[str] = Counter()
        self.problems: list[str] = []

    async def run(self) -> None:
        """Give every name a meaning, then change the meanings at random until ``end`` is called."""
        for name in self._own:
            await self._load(name)
        while not self._over:
            await asyncio.sleep(self._rng.uniform(0.2, 1.8) * self._pause)
            name = self._rng.choice(self._own)
            if self._names.now(name) is None:
                await self._load(name)
            else:
                changes = (self._load, self._take_name, self._unload, self._pin)
                await self._rng.choices(changes, weights=(6, 1, 3, 2))[0](name)

    def end(self) -> None:
        """Stop after the current change."""
        self._over = True

    async def unload_all(self) -> None:
        """Unload all names."""
        for name in self._own:
            if self._names.now(name) is not None:
                await self._unload(name)

    async def _load(self, name: str) -> None:
        """Load a content under a name. If the name already has a content, reload in place."""
        content, meant = self._rng.choice(self._contents), self._names.now(name)
        linked = self._rng.random() < 0.5
        path = self._links / name if linked else content.folder
        before = self._put(name) if linked else None
        exchange = self._names.exchange(name, time.monotonic()) if before is not None else None
        span = self._names.begin(name, content.number, time.monotonic())
        if linked:
            self._link(name, content.folder)
        pinned = self._rng.random() < 0.1
        request = pb.LoadLoraRequest(name=name, path=str(path), load_inplace=meant is not None, pinned=pinned)
        patience = self._rng.uniform(0.001, GIVES_UP_WITHIN) if self._rng.random() < GIVES_UP else None
        error = await self._answered(self._admin.LoadLora(request, timeout=patience))
        if patience is not None and error is not None and error.code == "DEADLINE_EXCEEDED":
            error = None if await self._means(name, content) else error
            self.counts["loads given up, " + ("done" if error is None else "not done")] += 1
        if error is None:
            self._names.done(name, span, time.monotonic())
            (self._pinned.add if pinned else self._pinned.discard)(name)
            self.counts["loads" if meant is None else "reloads"] += 1
            self.counts["reloads with other content"] += meant not in (None, content.number)
        else:
            if before is not None:
                self._link(name, before)
            self._names.failed(span, time.monotonic())
            given_up = (
                [(error.code, error.reason)] if patience is not None and error.code == "DEADLINE_EXCEEDED" else []
            )
            self._expect(error, f"load of {name}", ("RESOURCE_EXHAUSTED", "LORA_CACHE_FULL"), *given_up)
        if exchange is not None:
            exchange.ended = time.monotonic()

    async def _means(self, name: str, content: Content) -> bool:
        """Return whether a name has a content, after all earlier changes are complete."""
        error = await self._answered(
            self._admin.PinLora(pb.PinLoraRequest(name=NOBODY))
        )  # the frontend handles this call after all earlier changes
        assert error is not None, f"{NOBODY} was pinned"
        loras = (await self._admin.ListLoras(pb.ListLorasRequest())).loras
        return any((each.name, each.digest) == (name, content.digest) for each in loras)

    async def _take_name(self, name: str) -> None:
        """Load a different content under a used name, without permission to replace. The frontend must refuse the load."""
        meant = self._names.now(name)
        content = self._rng.choice([each for each in self._contents if each.number != meant])
        error = await self._answered(self._admin.LoadLora(pb.LoadLoraRequest(name=name, path=str(content.folder))))
        if error is None:
            self.problems.append(f"{name} was loaded again with other content")
            return
        self._expect(
            error,
            f"second load of {name}",
            ("ALREADY_EXISTS", "LORA_NAME_TAKEN"),
            ("RESOURCE_EXHAUSTED", "LORA_CACHE_FULL"),
        )

    async def _unload(self, name: str) -> None:
        span = self._names.begin(name, None, time.monotonic())
        error = await self._answered(self._admin.UnloadLora(pb.UnloadLoraRequest(name=name)))
        if error is not None:
            self._names.failed(span, time.monotonic())
            self._expect(error, f"unload of {name}")
            return
        self._names.done(name, span, time.monotonic())
        self._pinned.discard(name)
        self.counts["unloads"] += 1

    async def _pin(self, name: str) -> None:
        """Pin a name, or unpin a pinned one, because memory allows only a few pinned adapters."""
        if self._pinned:
            pinned = self._rng.choice(sorted(self._pinned))
            self._pinned.discard(pinned)
            error = await self._answered(self._admin.PinLora(pb.PinLoraRequest(name=pinned, unpin=True)))
            if error is not None:
                self._expect(error, f"unpinning of {pinned}")
            self.counts["unpins"] += 1
            return
        if (error := await self._answered(self._admin.PinLora(pb.PinLoraRequest(name=name)))) is not None:
            self._expect(error, f"pinning of {name}", ("RESOURCE_EXHAUSTED", "LORA_CACHE_FULL"))
            return
        self._pinned.add(name)
        self.counts["pins"] += 1

    def _put(self, name: str) -> Path | None:
        """Return the target of a name's link."""
        link = self._links / name
        return link.readlink() if link.is_symlink() else None

    def _link(self, name: str, folder: Path) -> None:
        """Point a name's link to a folder, atomically."""
        fresh = self._links / f".{name}"
        fresh.symlink_to(folder)
        fresh.replace(self._links / name)

    async def _answered(self, call: Awaitable[Any]) -> RequestFailed | None:
        try:
            await call
        except grpc.aio.AioRpcError as e:
            return from_rpc_error(e)
        return None

    def _expect(self, error: RequestFailed, what: str, *allowed: tuple[str, str]) -> None:
        self.counts[f"{error.code} {error.reason}"] += 1
        if (error.code, error.reason) not in allowed:
            self.problems.append(f"{what}: {error.code} {error.reason}: {error.message}")
