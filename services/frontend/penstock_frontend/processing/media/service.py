"""Media of requests, from where they are to what the model takes: fetched, checked, named, and processed once."""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, TypeVar

from penstock_common.config.reread import Reread
from penstock_common.errors import DeadlineExceeded, InvalidArgument, RequestFailed
from penstock_common.in_flight import BytesInFlight
from penstock_common.types.media import Modality
from penstock_frontend.config import LimitsConfig, MediaConfig
from penstock_frontend.media_parts import Features, Frames, MediaPart
from penstock_frontend.processing.media import refusals
from penstock_frontend.processing.media.base import PreparedMedia
from penstock_frontend.processing.media.decode_limits import TooLarge, Unreadable
from penstock_frontend.processing.media.families.base import Family
from penstock_frontend.processing.media.fetch import Resolver
from penstock_frontend.processing.media.identity import Arguments, Content, arguments_of, identifier
from penstock_frontend.processing.media.item import ProcessedItem
from penstock_frontend.processing.media.metrics import MediaMetrics
from penstock_frontend.processing.media.pool import WorkerPool
from penstock_frontend.processing.media.reader import Counted, MediaReader
from penstock_frontend.processing.media.store import MediaStore
from penstock_frontend.processing.media.worker_process import Job

T = TypeVar("T")

_AT_ONCE = 8
"""Items of one request that are read at once."""
_LONGEST_ARGUMENTS = 64 * 1024
"""Bytes of what a request gives the processor."""


class MediaService:
    """The MediaPreparer of a frontend whose model takes media. It starts with the first that is to be processed,
    or by ``start``.
    """

    def __init__(
        self,
        family: Family,
        config: MediaConfig,
        limits: Reread[LimitsConfig],
        metrics: MediaMetrics,
        *,
        resolver: Resolver | None = None,
    ) -> None:
        """``resolver``: finds the addresses of hosts, in place of the system. Raises ConfigError."""
        self.family = family
        self._limits = limits
        self._metrics = metrics
        self._reader = MediaReader(config, metrics, resolver)
        self.store = MediaStore(
            config.store_bytes, on_lookup=lambda hit: metrics.looked_up(hit=hit), on_size=metrics.stored
        )
        self._pool = WorkerPool(family.make_processor(), family.sampling_rate, config, metrics)
        self.in_flight = BytesInFlight(
            lambda: limits.now.max_media_bytes_in_flight, "limits.max_media_bytes_in_flight", what="media"
        )
        self._starting: asyncio.Task[None] | None = None
        self._closed = False

    @property
    def worker_pids(self) -> list[int]:
        """Of the media workers that are ready."""
        return self._pool.pids

    async def start(self) -> None:
        """Start the media workers. Raises ConfigError when the model's processor cannot be made. Idempotent."""
        if self._starting is None:
            self._starting = asyncio.create_task(self._pool.start())
        try:
            await asyncio.shield(self._starting)
        except asyncio.CancelledError:
            if self._closed and self._starting.cancelled():  # not whoever waits for it
                raise refusals.shutting_down() from None
            raise

    async def close(self) -> None:
        """End the media workers; what still comes fails as Unavailable. Idempotent."""
        self._closed = True
        if self._starting is not None and not self._starting.done():
            self._starting.cancel()
            await asyncio.gather(self._starting, return_exceptions=True)
        await self._pool.close()
        self._reader.close()

    async def prepare(
        self, parts: Sequence[MediaPart], *, cache_salt: str, deadline: float | None, tenant: str = ""
    ) -> list[PreparedMedia]:
        """As ``MediaPreparer`` has it."""
        if not parts:
            return []
        if self._closed:
            raise refusals.shutting_down()
        self._check(parts)
        room = asyncio.Semaphore(_AT_ONCE)
        try:
            async with asyncio.timeout(None if deadline is None else max(0.0, deadline - time.time())):
                return await _all([self._prepare(part, cache_salt, tenant, room) for part in parts])
        except TimeoutError:
            raise DeadlineExceeded("the deadline passed before the request's media were processed") from None

    def _check(self, parts: Sequence[MediaPart]) -> None:
        """What can be said before anything is read."""
        counts: dict[str, int] = {}
        with _refused_as(self._metrics, parts[0]):
            for part in parts:
                if part.modality not in self.family.modalities:
                    takes = ", ".join(sorted(self.family.modalities))
                    raise InvalidArgument(
                        f"{part.field} is of {part.modality}; the model takes {takes}", field=part.field
                    )
                counts[part.modality] = counts.get(part.modality, 0) + 1
                if (limit := self._limits.now.max_media.of(part.modality)) < counts[part.modality]:
                    total = sum(each.modality == part.modality for each in parts)
                    raise refusals.too_many(part.field, part.modality, total, limit)
                self._reader.check(part)

    async def _prepare(self, part: MediaPart, cache_salt: str, tenant: str, room: asyncio.Semaphore) -> PreparedMedia:
        with _refused_as(self._metrics, part), Counted(self.in_flight, part.field) as counted:
            arguments = _arguments(part)
            async with room:
                content = await self._reader.read(part, counted)
                name = await self._reader.look(
                    content,
                    lambda: identifier(
                        part.modality,
                        content,
                        family=self.family.identity,
                        arguments=arguments,
                        cache_salt=cache_salt,
                    ),
                )
            try:
                item = await self.store.get(name, self._making(part.modality, content, arguments, tenant))
            except TooLarge as e:
                raise refusals.too_large(part.field, e.what, e.setting, e.limit) from None
            except Unreadable as e:
                raise refusals.unreadable(part.field, str(e)) from None
            return PreparedMedia(item, name)

    def _making(
        self, modality: Modality, content: Content, arguments: Arguments, tenant: str
    ) -> Callable[[], Awaitable[ProcessedItem]]:
        """What makes the item where it is not there. The one made is for all who ask, so its errors name no field."""

        async def describe() -> ProcessedItem:
            assert isinstance(content, Features)  # noqa: S101 - for the type
            try:
                return self.family.described(modality, content.tensors)
            except ValueError as e:
                raise Unreadable(f"has tensors that the model does not take: {e}") from None

        if isinstance(content, Features):
            return describe
        files = [frame.data for frame in content.frames] if isinstance(content, Frames) else [content.data]
        timestamps = [frame.timestamp for frame in content.frames] if isinstance(content, Frames) else []
        job = Job(modality, files, timestamps, arguments)

        async def process() -> ProcessedItem:
            await self.start()
            return await self._pool.process(job, tenant)

        return process


@contextlib.contextmanager
def _refused_as(metrics: MediaMetrics, part: MediaPart) -> Any:
    try:
        yield
    except RequestFailed as e:
        metrics.refused(part.modality, e.reason)
        raise


async def _all(work: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """What they return, in order; the first error ends the others, which is waited for."""
    tasks = [asyncio.ensure_future(each) for each in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _arguments(part: MediaPart) -> Arguments:
    try:
        arguments = arguments_of(part.processor_kwargs)
    except ValueError as e:
        raise InvalidArgument(f"{part.field} has processor_kwargs that {e}", field=part.field) from None
    if len(arguments) > _LONGEST_ARGUMENTS:
        raise InvalidArgument(
            f"{part.field} has processor_kwargs of {len(arguments)} bytes; the limit is {_LONGEST_ARGUMENTS}",
            field=part.field,
        )
    return arguments
