"""Media service, which fetches, checks, identifies and processes the media of requests. Each identifier is processed
only once.
"""

import asyncio
import contextlib
import time
import weakref
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, NamedTuple, TypeVar

from penstock_common.config.settings import Reread
from penstock_common.errors import DeadlineExceeded, InvalidArgument, RequestFailed
from penstock_common.in_flight import BytesInFlight
from penstock_common.types.media import Modality, TensorData
from penstock_frontend.call_types import EncodedFile, Features, Frames, MediaPart
from penstock_frontend.config import LimitsConfig, MediaConfig
from penstock_frontend.metrics import MediaMetrics
from penstock_frontend.processing.media import sources
from penstock_frontend.processing.media.families.base import Family, PreparedMedia, ProcessedItem
from penstock_frontend.processing.media.http_client import Resolver
from penstock_frontend.processing.media.pool import Job, WorkerPool
from penstock_frontend.processing.media.reader import Arguments, Content, Counted, MediaReader, arguments_of, identifier
from penstock_frontend.processing.media.split_speech import SplitSpeech, split_speech
from penstock_frontend.processing.media.worker_messages import TooLarge, Unreadable

# The classes below store processed items by identifier. While an item is cached here, or a request uses the item, it is
# not created again.


class _Alive(NamedTuple):
    """Processed item that the store can find as long as its tensors are in use."""

    item: ProcessedItem
    """The processed item without its tensors."""
    tensors: dict[str, "weakref.ref[TensorData]"]

    def whole(self) -> ProcessedItem | None:
        """Return the item with its tensors. Return None if the tensors were freed."""
        data = {name: found for name, tensor in self.tensors.items() if (found := tensor()) is not None}
        if len(data) < len(self.tensors):
            return None
        return _with_data(self.item, data)


class _Flight:
    """Item that is being created, and the number of callers that wait for the item."""

    __slots__ = ("task", "waiting")

    def __init__(self, task: "asyncio.Task[ProcessedItem]") -> None:
        self.task = task
        self.waiting = 0


class MediaStore:
    """LRU cache of processed items. The cached items have at most ``max_bytes`` bytes.

    A request keeps the tensors of its items alive. While a request uses an item, the store finds the item even after it
    was evicted, and does not create it again. All methods of a store must be called on the same event loop.
    """

    def __init__(self, max_bytes: int, metrics: MediaMetrics) -> None:
        self._max_bytes = max_bytes
        self._metrics = metrics
        self._kept: OrderedDict[str, ProcessedItem] = OrderedDict()
        self._alive: dict[str, _Alive] = {}
        self._flights: dict[str, _Flight] = {}
        self.num_bytes = 0
        """Size of all cached items in bytes, including the items that requests use."""

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def num_alive(self) -> int:
        """Number of items that the store can find, because they are cached or because requests use them."""
        return len(self._alive)

    async def get(self, identifier: str, make: Callable[[], Awaitable[ProcessedItem]]) -> ProcessedItem:
        """Return the item with this identifier. If the store does not find the item, create it with ``make``.

        If several callers ask for the same item at once, ``make`` is called once, and all of them get its result or its
        error. ``make`` is cancelled only if all these callers are cancelled.
        """
        flight = self._flights.get(identifier)
        found = self._find(identifier) if flight is None else None
        self._metrics.series("penstock:media_store_queries").inc()
        if flight is not None or found is not None:
            self._metrics.series("penstock:media_store_hits").inc()
        if found is not None:
            return found
        if flight is None:
            flight = self._flights[identifier] = _Flight(asyncio.create_task(self._make(identifier, make)))
            flight.task.add_done_callback(_look_at)
        flight.waiting += 1
        try:
            return await asyncio.shield(flight.task)
        finally:
            flight.waiting -= 1
            if not flight.waiting and not flight.task.done():
                flight.task.cancel()
                if self._flights.get(identifier) is flight:  # later callers must create the item again
                    del self._flights[identifier]

    def clear(self) -> None:
        """Drop all cached items. The items that requests use stay in memory."""
        self._kept.clear()
        self._alive.clear()
        self.num_bytes = 0
        self._metrics.series("penstock:media_store_bytes").set(0)

    async def _make(self, identifier: str, make: Callable[[], Awaitable[ProcessedItem]]) -> ProcessedItem:
        task = asyncio.current_task()
        try:
            item = await make()
        finally:
            if (flight := self._flights.get(identifier)) is not None and flight.task is task:
                del self._flights[identifier]
        self._keep(identifier, item)
        return item

    def _find(self, identifier: str) -> ProcessedItem | None:
        if (kept := self._kept.get(identifier)) is not None:
            self._kept.move_to_end(identifier)
            return kept
        if (alive := self._alive.get(identifier)) is None or (item := alive.whole()) is None:
            return None
        self._keep(identifier, item)
        return item

    def _keep(self, identifier: str, item: ProcessedItem) -> None:
        self._watch(identifier, item)
        if item.num_bytes > self._max_bytes:
            return
        if (old := self._kept.pop(identifier, None)) is not None:
            self.num_bytes -= old.num_bytes
        self._kept[identifier] = item
        self.num_bytes += item.num_bytes
        while self.num_bytes > self._max_bytes:
            _, gone = self._kept.popitem(last=False)
            self.num_bytes -= gone.num_bytes
        self._metrics.series("penstock:media_store_bytes").set(self.num_bytes)

    def _watch(self, identifier: str, item: ProcessedItem) -> None:
        def gone(tensor: "weakref.ref[TensorData]") -> None:
            now = self._alive.get(identifier)
            if now is not None and any(tensor is each for each in now.tensors.values()):
                del self._alive[identifier]

        tensors = {name: weakref.ref(tensor, gone) for name, tensor in item.data.items()}
        self._alive[identifier] = _Alive(_with_data(item, {}), tensors)


def _with_data(item: ProcessedItem, data: dict[str, TensorData]) -> ProcessedItem:
    return ProcessedItem(modality=item.modality, data=data, num_embeds=item.num_embeds, layout=item.layout)


def _look_at(task: "asyncio.Task[ProcessedItem]") -> None:
    """Retrieve the error of a task, so that asyncio does not log the error as unhandled."""
    if not task.cancelled():
        task.exception()


T = TypeVar("T")

_AT_ONCE = 8
"""Maximum number of media items of one request that are read at the same time."""
_LONGEST_ARGUMENTS = 64 * 1024
"""Maximum size of the arguments for the model's processor, in bytes."""


class MediaService:
    """MediaPreparer of a frontend with a multimodal model.

    The media workers start when ``start`` is called, or when the first item must be processed.
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
        """Create the media service of a frontend. ``resolver`` is used instead of the system's resolver for host names.
        Raises ConfigError if the certificates of ``media.ca`` cannot be read.
        """
        self.family = family
        self._limits = limits
        self._metrics = metrics
        self._reader = MediaReader(config, metrics, resolver)
        self.store = MediaStore(config.store_bytes, metrics)
        self._pool = WorkerPool(family.make_processor(), family.sampling_rate, config, metrics)
        self.in_flight = _bytes_in_flight(limits)
        # Windows of speech are counted separately. They are held while the windows themselves are processed as media.
        self._speech_in_flight = _bytes_in_flight(limits)
        self._starting: asyncio.Task[None] | None = None
        self._closed = False

    @property
    def worker_pids(self) -> list[int]:
        """Process ids of the media workers that are ready."""
        return self._pool.pids

    async def start(self) -> None:
        """Start the media workers. Raises ConfigError if the model's processor cannot be created. Idempotent."""
        if self._starting is None:
            self._starting = asyncio.create_task(self._pool.start())
        try:
            await asyncio.shield(self._starting)
        except asyncio.CancelledError:
            if self._closed and self._starting.cancelled():
                # ``close`` cancelled the start of the workers, and the caller was not cancelled
                raise sources.shutting_down() from None
            raise

    async def close(self) -> None:
        """End the media workers. After that, requests with media fail with Unavailable. Idempotent."""
        self._closed = True
        if self._starting is not None and not self._starting.done():
            self._starting.cancel()
            await asyncio.gather(self._starting, return_exceptions=True)
        await self._pool.close()
        self._reader.close()

    async def prepare(
        self, parts: Sequence[MediaPart], *, cache_salt: str, deadline: float | None, tenant: str = ""
    ) -> list[PreparedMedia]:
        """Prepare the media of a request, as ``MediaPreparer.prepare`` describes."""
        if not parts:
            return []
        if self._closed:
            raise sources.shutting_down()
        self._check(parts)
        room = asyncio.Semaphore(_AT_ONCE)
        try:
            async with asyncio.timeout(None if deadline is None else max(0.0, deadline - time.time())):
                return await _all([self._prepare(part, cache_salt, tenant, room) for part in parts])
        except TimeoutError:
            raise DeadlineExceeded("the request's deadline passed before its media were processed") from None

    async def split(self, part: MediaPart, *, deadline: float | None, tenant: str = "") -> SplitSpeech:
        """Decode an audio file, and divide its speech into windows of at most 30 s. Silent windows are left out.

        Raises the errors of ``MediaPreparer.prepare``.
        """
        if self._closed:
            raise sources.shutting_down()
        self._check([part])
        with _refused_as(self._metrics, part), Counted(self.in_flight, part.field) as counted:
            try:
                async with asyncio.timeout(None if deadline is None else max(0.0, deadline - time.time())):
                    content = await self._reader.read(part, counted)
                    assert isinstance(content, EncodedFile)  # noqa: S101 - an audio part with a file or a URL has one
                    await self.start()
                    item = await self._pool.process(Job("audio", [content.data], [], b"{}", "split"), tenant)
                return split_speech(item, self.family.sampling_rate, self._speech_in_flight)
            except TimeoutError:
                raise DeadlineExceeded("the request's deadline passed before its audio was decoded") from None
            except TooLarge as e:
                raise sources.too_large(part.field, e.what, e.setting, e.limit) from None
            except Unreadable as e:
                raise sources.unreadable(part.field, str(e)) from None

    def _check(self, parts: Sequence[MediaPart]) -> None:
        """Check media items as far as possible without reading them from their sources."""
        counts: dict[str, int] = {}
        with _refused_as(self._metrics, parts[0]):
            for part in parts:
                if part.modality not in self.family.modalities:
                    takes = ", ".join(sorted(self.family.modalities))
                    raise InvalidArgument(
                        f"{part.field} is {part.modality}; the model accepts {takes}", field=part.field
                    )
                counts[part.modality] = counts.get(part.modality, 0) + 1
                if (limit := self._limits.now.max_media.of(part.modality)) < counts[part.modality]:
                    total = sum(each.modality == part.modality for each in parts)
                    raise sources.too_many(part.field, part.modality, total, limit)
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
                raise sources.too_large(part.field, e.what, e.setting, e.limit) from None
            except Unreadable as e:
                raise sources.unreadable(part.field, str(e)) from None
            return PreparedMedia(item, name)

    def _making(
        self, modality: Modality, content: Content, arguments: Arguments, tenant: str
    ) -> Callable[[], Awaitable[ProcessedItem]]:
        """Return a function that creates a processed item.

        Several requests may share the result of the function, so its errors name no field of a request.
        """

        async def describe() -> ProcessedItem:
            assert isinstance(content, Features)  # noqa: S101 - narrows the type
            try:
                return self.family.described(modality, content.tensors)
            except ValueError as e:
                raise Unreadable(f"has tensors that the model does not accept: {e}") from None

        if isinstance(content, Features):
            return describe
        files = [frame.data for frame in content.frames] if isinstance(content, Frames) else [content.data]
        timestamps = [frame.timestamp for frame in content.frames] if isinstance(content, Frames) else []
        job = Job(modality, files, timestamps, arguments)

        async def process() -> ProcessedItem:
            await self.start()
            return await self._pool.process(job, tenant)

        return process


def _bytes_in_flight(limits: Reread[LimitsConfig]) -> BytesInFlight:
    return BytesInFlight(lambda: limits.now.max_media_bytes_in_flight, "limits.max_media_bytes_in_flight", what="media")


@contextlib.contextmanager
def _refused_as(metrics: MediaMetrics, part: MediaPart) -> Any:
    try:
        yield
    except RequestFailed as e:
        metrics.series("penstock:media_refused", part.modality, e.reason).inc()
        raise


async def _all(work: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Return the results of all coroutines, in the order of the coroutines.

    If a coroutine fails, cancel the other coroutines, wait until they have ended, and raise the error.
    """
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
