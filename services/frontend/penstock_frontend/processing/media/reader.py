"""Media as requests give them, to their bytes: fetched or decoded from base64, counted, and checked without being opened."""

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from penstock_common.errors import ResourceExhausted
from penstock_common.in_flight import BytesInFlight, Held
from penstock_frontend.config import MediaConfig
from penstock_frontend.media_parts import EncodedFile, Features, Frames, MediaPart, Url
from penstock_frontend.processing.media import refusals
from penstock_frontend.processing.media.data_urls import (
    DataUrlError,
    decode_data_url,
    is_data_url,
    parse_data_url,
)
from penstock_frontend.processing.media.features import check_tensors
from penstock_frontend.processing.media.fetch import Fetcher, Resolver
from penstock_frontend.processing.media.identity import Content
from penstock_frontend.processing.media.metrics import MediaMetrics
from penstock_frontend.processing.media.sniff import FORMATS, is_of

T = TypeVar("T")

_LONG = 256 * 1024
"""Bytes from which on a thread looks at them, while the event loop goes on."""
_COUNTED_AT_ONCE = 1024 * 1024
"""Bytes of a file that comes without its size are counted in such pieces."""


class Counted:
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

    def __enter__(self) -> "Counted":
        return self

    def __exit__(self, *_: object) -> None:
        for held in self._held:
            held.release()


class MediaReader:
    """Reads the sources of media."""

    def __init__(self, config: MediaConfig, metrics: MediaMetrics, resolver: Resolver | None = None) -> None:
        """``resolver``: finds the addresses of hosts, in place of the system. Raises ConfigError."""
        self._config = config
        self._metrics = metrics
        self._fetcher = Fetcher(config, resolver)
        # One: several that want the interpreter would keep it from the event loop all the longer.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="media-bytes")
        self._closed = False

    def close(self) -> None:
        """What is being read is read to its end; more cannot be."""
        self._closed = True
        self._fetcher.close()
        self._thread.shutdown(wait=False)

    def check(self, part: MediaPart) -> None:
        """What can be said before anything is read. Raises PermissionDenied for what is not allowed, InvalidArgument."""
        if isinstance(part.source, Features) and not self._config.allow_features:
            raise refusals.not_allowed(part.field, "has tensors; media.allow_features is false")
        if isinstance(part.source, Url) and not is_data_url(part.source.url):
            self._fetcher.check(part.source.url, field=part.field)

    async def look(self, content: Content, work: Callable[[], T]) -> T:
        """What ``work`` returns, which looks at all of a medium: beside the event loop where that takes long."""
        if size_of(content) <= _LONG:
            return work()
        self._check_open()
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    async def read(self, part: MediaPart, counted: "Counted") -> Content:
        """The medium itself, checked as far as its first bytes show it. Raises RequestFailed."""
        source = part.source
        if isinstance(source, Features):
            size = size_of(source)
            self._check_size(size, part.field)
            counted(size)
            await self.look(source, lambda: check_tensors(source.tensors, field=part.field))
            return source
        if isinstance(source, Frames):
            if part.modality != "video":
                raise refusals.unreadable(part.field, f"has frames; {part.modality} is one file")
            self._check_frames(source, part.field)
            counted(size_of(source))
            return source
        if isinstance(source, Url):
            data = await self._url(part, source, counted)
        else:
            data = source.data
            self._check_size(len(data), part.field)
            counted(len(data))
        if part.modality == "video":
            raise refusals.unreadable(part.field, "is a file; video is taken as frames")
        self._check_format(part, data)
        return EncodedFile(data)

    async def _url(self, part: MediaPart, source: Url, counted: "Counted") -> bytes:
        if is_data_url(source.url):
            return await self._data_url(part, source, counted)
        started = time.perf_counter()
        data = await self._fetcher.fetch(source.url, field=part.field, counted=counted)
        self._metrics.took(part.modality, "fetch", time.perf_counter() - started)
        return data

    async def _data_url(self, part: MediaPart, source: Url, counted: "Counted") -> bytes:
        try:
            url = parse_data_url(source.url)
            counted(url.most_bytes)
            if url.most_bytes <= _LONG:
                data = decode_data_url(url, unwritten=source.unwritten)
            else:
                self._check_open()
                data = await asyncio.get_running_loop().run_in_executor(
                    self._thread, lambda: decode_data_url(url, unwritten=source.unwritten)
                )
        except DataUrlError as e:
            raise refusals.unreadable(part.field, str(e)) from None
        self._check_size(len(data), part.field)
        return data

    def _check_open(self) -> None:
        if self._closed:
            raise refusals.shutting_down()

    def _check_frames(self, source: Frames, field: str) -> None:
        self._check_size(size_of(source), field)
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


def size_of(content: Content) -> int:
    """Bytes."""
    if isinstance(content, EncodedFile):
        return len(content.data)
    if isinstance(content, Frames):
        return sum(len(frame.data) for frame in content.frames)
    return sum(len(tensor.data) for tensor in content.tensors.values())


def _either(modality: str) -> str:
    names = FORMATS[modality]  # type: ignore[index]  # a modality
    return f"{', '.join(names[:-1])} or {names[-1]}"
