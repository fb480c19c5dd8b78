"""Media of requests, from where they are to what the model takes: fetched, checked, named, and processed once."""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from penstock_common.config.reread import Reread
from penstock_common.errors import DeadlineExceeded, InvalidArgument, RequestFailed, ResourceExhausted, Unavailable
from penstock_common.in_flight import BytesInFlight, Held
from penstock_common.types.media import Modality
from penstock_frontend.config import LimitsConfig, MediaConfig
from penstock_frontend.processing.media import refusals
from penstock_frontend.processing.media.base import PreparedMedia
from penstock_frontend.processing.media.decode_limits import TooLarge, Unreadable
from penstock_frontend.processing.media.families.base import Family
from penstock_frontend.processing.media.features import check_tensors
from penstock_frontend.processing.media.fetch import Fetcher, Resolver
from penstock_frontend.processing.media.identity import Arguments, Content, arguments_of, identifier
from penstock_frontend.processing.media.item import ProcessedItem
from penstock_frontend.processing.media.metrics import MediaMetrics
from penstock_frontend.processing.media.part import EncodedFile, Features, Frames, MediaPart, Url
from penstock_frontend.processing.media.pool import WorkerPool
from penstock_frontend.processing.media.sniff import FORMATS, is_of
from penstock_frontend.processing.media.sources import data_url_size, is_data_url, read_data_url
from penstock_frontend.processing.media.store import MediaStore
from penstock_frontend.processing.media.worker_process import Job

T = TypeVar("T")

_AT_ONCE = 8
"""Items of one request that are read at once."""
_LONG = 256 * 1024
"""Bytes from which on a thread hashes or looks at them, while the event loop goes on."""
_COUNTED_AT_ONCE = 1024 * 1024
"""Bytes of a file that comes without its size are counted in such pieces."""
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
        self._config = config
        self._limits = limits
        self._metrics = metrics
        self._fetcher = Fetcher(config, resolver)
        self.store = MediaStore(
            config.store_bytes, on_lookup=lambda hit: metrics.looked_up(hit=hit), on_size=metrics.stored
        )
        self._pool = WorkerPool(family.make_processor(), family.sampling_rate, config, metrics)
        self.in_flight = BytesInFlight(
            lambda: limits.now.max_media_bytes_in_flight, "limits.max_media_bytes_in_flight", what="media"
        )
        # One: several that want the interpreter would keep it from the event loop all the longer.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="media-bytes")
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
                raise _shutting_down() from None
            raise

    async def close(self) -> None:
        """End the media workers; what still comes fails as Unavailable. Idempotent."""
        self._closed = True
        if self._starting is not None and not self._starting.done():
            self._starting.cancel()
            await asyncio.gather(self._starting, return_exceptions=True)
        await self._pool.close()
        self._fetcher.close()
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def prepare(
        self, parts: Sequence[MediaPart], *, cache_salt: str, deadline: float | None
    ) -> list[PreparedMedia]:
        """As ``MediaPreparer`` has it."""
        if not parts:
            return []
        if self._closed:
            raise _shutting_down()
        self._check(parts)
        room = asyncio.Semaphore(_AT_ONCE)
        try:
            async with asyncio.timeout(None if deadline is None else max(0.0, deadline - time.time())):
                return await _all([self._prepare(part, cache_salt, room) for part in parts])
        except TimeoutError:
            raise DeadlineExceeded("the deadline passed before the request's media were processed") from None

    async def _off_loop(self, is_long: bool, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work) if is_long else work()

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
                if isinstance(part.source, Features) and not self._config.allow_features:
                    raise refusals.not_allowed(part.field, "has tensors; media.allow_features is false")
                if isinstance(part.source, Url) and not is_data_url(part.source.url):
                    self._fetcher.check(part.source.url, field=part.field)

    async def _prepare(self, part: MediaPart, cache_salt: str, room: asyncio.Semaphore) -> PreparedMedia:
        with _refused_as(self._metrics, part), _Counted(self.in_flight, part.field) as counted:
            arguments = _arguments(part)
            async with room:
                content = await self._read(part, counted)
                name = await self._off_loop(
                    _size(content) > _LONG,
                    lambda: identifier(
                        part.modality,
                        content,
                        family=self.family.identity,
                        arguments=arguments,
                        cache_salt=cache_salt,
                    ),
                )
            try:
                item = await self.store.get(name, self._making(part.modality, content, arguments))
            except TooLarge as e:
                raise refusals.too_large(part.field, e.what, e.setting, e.limit) from None
            except Unreadable as e:
                raise refusals.unreadable(part.field, str(e)) from None
            return PreparedMedia(item, name)

    async def _read(self, part: MediaPart, counted: "_Counted") -> Content:
        """The medium itself, checked as far as its first bytes show it."""
        source = part.source
        if isinstance(source, Features):
            size = _size(source)
            self._check_size(size, part.field)
            counted(size)
            await self._off_loop(
                size > _LONG,
                lambda: check_tensors(source.tensors, field=part.field),
            )
            return source
        if isinstance(source, Frames):
            if part.modality != "video":
                raise refusals.unreadable(part.field, f"has frames; {part.modality} is one file")
            self._check_frames(source, part.field)
            counted(_size(source))
            return source
        if isinstance(source, Url):
            data = await self._url(part, source.url, counted)
        else:
            data = source.data
            self._check_size(len(data), part.field)
            counted(len(data))
        if part.modality == "video":
            raise refusals.unreadable(part.field, "is a file; video is taken as frames")
        self._check_format(part, data)
        return EncodedFile(data)

    async def _url(self, part: MediaPart, url: str, counted: "_Counted") -> bytes:
        if is_data_url(url):
            size = data_url_size(url, field=part.field)
            self._check_size(size, part.field)
            counted(size)
            return await read_data_url(url, field=part.field, thread=self._thread)
        started = time.perf_counter()
        data = await self._fetcher.fetch(url, field=part.field, counted=counted)
        self._metrics.took(part.modality, "fetch", time.perf_counter() - started)
        return data

    def _check_frames(self, source: Frames, field: str) -> None:
        self._check_size(_size(source), field)
        if not source.frames:
            raise refusals.unreadable(field, "has no frames")
        if (count := len(source.frames)) > self._config.max_frames:
            raise refusals.too_large(field, f"has {count} frames", "media.max_frames", self._config.max_frames)
        before = 0.0
        for index, frame in enumerate(source.frames):
            if not before <= frame.timestamp < float("inf"):
                raise refusals.unreadable(
                    field,
                    f"has a timestamp of {frame.timestamp} at frame {index}; they must be finite and rise from 0 on",
                )
            before = frame.timestamp
            if not is_of("video", frame.data):
                raise refusals.unreadable(field, f"has a frame {index} that is no {_either('video')} file")

    def _check_size(self, size: int, field: str) -> None:
        if not size:
            raise refusals.unreadable(field, "is empty")
        if size > self._config.max_bytes:
            raise refusals.too_large(field, f"has {size} bytes", "media.max_bytes", self._config.max_bytes)

    def _check_format(self, part: MediaPart, data: bytes) -> None:
        if not is_of(part.modality, data):
            raise refusals.unreadable(part.field, f"is no {_either(part.modality)} file")

    def _making(
        self, modality: Modality, content: Content, arguments: Arguments
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
            return await self._pool.process(job)

        return process


class _Counted:
    """Counts a medium's bytes until it is processed."""

    def __init__(self, in_flight: BytesInFlight, field: str) -> None:
        self._in_flight, self._field = in_flight, field
        self._held: list[Held] = []
        self._uncounted = 0

    def __call__(self, size: int) -> None:
        """So many more. Raises ResourceExhausted."""
        self._uncounted += size
        if self._held and self._uncounted < _COUNTED_AT_ONCE:
            return
        if (refusal := self._in_flight.refusal(self._uncounted)) is not None:
            raise ResourceExhausted(
                refusal.message, field=self._field, reason=refusal.reason, retry_after=refusal.retry_after
            )
        if isinstance(held := self._in_flight.hold(None, self._uncounted), Held):
            self._held.append(held)
            self._uncounted = 0

    def __enter__(self) -> "_Counted":
        return self

    def __exit__(self, *_: object) -> None:
        for held in self._held:
            held.release()


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


def _shutting_down() -> Unavailable:
    return Unavailable("this frontend is shutting down", reason="SHUTTING_DOWN", retry_after=1.0)


def _size(content: Content) -> int:
    if isinstance(content, EncodedFile):
        return len(content.data)
    if isinstance(content, Frames):
        return sum(len(frame.data) for frame in content.frames)
    return sum(len(tensor.data) for tensor in content.tensors.values())


def _either(modality: str) -> str:
    names = FORMATS[modality]  # type: ignore[index]  # a modality
    return f"{', '.join(names[:-1])} or {names[-1]}"
