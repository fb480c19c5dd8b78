"""Reader for the media of requests, which fetches or decodes files, checks them, and computes identifiers."""

import asyncio
import hashlib
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import msgspec
import numpy as np

from penstock_common.errors import ResourceExhausted, quoted
from penstock_common.in_flight import BytesInFlight, Held
from penstock_common.types.media import DTYPE_BYTES, LARGEST_NUMBER, Modality, TensorData
from penstock_frontend.call_types import EncodedFile, Features, Frames, MediaPart, Url
from penstock_frontend.config import MediaConfig
from penstock_frontend.metrics import MediaMetrics
from penstock_frontend.processing.media import sources
from penstock_frontend.processing.media.data_urls import DataUrlError, decode_data_url, is_data_url, parse_data_url
from penstock_frontend.processing.media.http_client import Fetcher, Resolver
from penstock_frontend.processing.media.sniff import FORMATS, is_of

# The code below checks tensors that clients have preprocessed themselves. The checks are the same for all models.

_MAX_TENSORS = 64
_MAX_DIMENSIONS = 8
_BEYOND_IN_BFLOAT16 = 0x4780
"""Smallest bfloat16 bit pattern, without the sign bit, whose value is above ``LARGEST_NUMBER``."""


def check_tensors(tensors: Mapping[str, TensorData], *, field: str) -> None:
    """Raise InvalidArgument if preprocessed tensors of a client are not valid.

    Tensors are not valid if there are too many of them, or if their number of bytes does not match their shape. Their
    numbers must be finite, and in the range of float16. The check reads every number, so callers must run it in a
    thread if the tensors are large.
    """
    if not tensors:
        raise sources.unreadable(field, "has no tensors")
    if len(tensors) > _MAX_TENSORS:
        raise sources.too_large(field, f"has {len(tensors)} tensors", "the limit", _MAX_TENSORS)
    for name, tensor in tensors.items():
        where = f"{field}.tensors[{name[:64]!r}]"
        if len(tensor.shape) > _MAX_DIMENSIONS or any(length < 0 for length in tensor.shape):
            raise sources.unreadable(
                field, f"has a tensor {quoted(name)} with the shape {list(tensor.shape[:16])}, which is not valid"
            )
        needed = math.prod(tensor.shape) * DTYPE_BYTES[tensor.dtype]
        if len(tensor.data) != needed:
            raise sources.unreadable(
                where,
                f"has {len(tensor.data)} bytes; {tensor.dtype} with the shape {list(tensor.shape)} needs {needed} bytes",
            )
        if not needed:
            raise sources.unreadable(where, "is empty")
        if not _is_in_range(tensor):
            raise sources.unreadable(where, f"has numbers that are not finite, or above {LARGEST_NUMBER}")


def _is_in_range(tensor: TensorData) -> bool:
    if tensor.dtype == "bfloat16":
        bits = np.frombuffer(tensor.data, "<u2")
        return bool(((bits & 0x7FFF) < _BEYOND_IN_BFLOAT16).all())
    if not tensor.dtype.startswith("float"):
        return True
    numbers = np.frombuffer(tensor.data, np.dtype(tensor.dtype).newbyteorder("<"))
    return bool((np.abs(numbers) <= LARGEST_NUMBER).all())


# The code below computes identifiers of media. Every store and cache of media uses these identifiers.

_KEY_BYTES = hashlib.blake2b.MAX_KEY_SIZE
_LENGTH_BYTES = 8
_canonical = msgspec.json.Encoder(order="deterministic")

_DECODING = b"2"
"""Version of the code that decodes files to pixels and samples.

The version must be increased if the same file gives other values than before. Engines and tiers keep embeddings and KV
blocks for longer than a frontend runs. Since version 2, transparent pixels are composited on white, and 16-bit grey is
scaled.
"""

Arguments = bytes
"""Arguments for the model's processor as the JSON text of an object, with the keys in canonical order."""
Content = EncodedFile | Frames | Features
"""Content of a media item, after it was read into memory."""


def identifier(
    modality: Modality,
    content: Content,
    *,
    family: bytes,
    arguments: Arguments,
    cache_salt: str,
) -> str:
    """Return the identifier of a media item, which has 64 hexadecimal digits.

    The identifier is a BLAKE2b-256 hash with the cache salt as key. The hash covers all data on which the item's
    embeddings depend.

    In the hashed data, each part follows after its length. ``family`` is ``Family.identity``. Names that clients give
    to media are not part of the hash.
    """
    hashed = hashlib.blake2b(digest_size=32, key=_key(cache_salt))
    for field in (modality.encode(), family, arguments, *_fields(content)):
        hashed.update(len(field).to_bytes(_LENGTH_BYTES, "little"))
        hashed.update(field)
    return hashed.hexdigest()


def arguments_of(processor_kwargs: Mapping[str, Any]) -> Arguments:
    """Encode the arguments for the model's processor as JSON. Raises ValueError for values that JSON cannot represent."""
    try:
        return _canonical.encode(dict(processor_kwargs))
    except (TypeError, ValueError, OverflowError, RecursionError) as e:
        raise ValueError("cannot be encoded as JSON") from e


def _key(cache_salt: str) -> bytes:
    salt = cache_salt.encode()
    return salt if len(salt) <= _KEY_BYTES else hashlib.blake2b(salt, digest_size=32).digest()


def _fields(content: Content) -> Iterator[bytes | bytearray]:
    """Yield the parts of a media item's content that are hashed.

    The first part is the kind of content, so that contents of different kinds have different identifiers.
    """
    if isinstance(content, EncodedFile):
        yield from (b"file", _DECODING, content.data)
    elif isinstance(content, Frames):
        yield from (b"frames", _DECODING)
        for frame in content.frames:
            yield from (repr(float(frame.timestamp)).encode(), frame.data)
    else:
        yield b"features"
        yield from _tensors(content.tensors.items())


def _tensors(tensors: Iterable[tuple[str, TensorData]]) -> Iterator[bytes | bytearray]:
    for name, tensor in sorted(tensors, key=lambda item: item[0]):
        yield from (name.encode(), tensor.dtype.encode(), _canonical.encode(tensor.shape), tensor.data)


T = TypeVar("T")

_LONG = 256 * 1024
"""Size in bytes above which a thread processes a media item, so that the event loop is not blocked."""
_COUNTED_AT_ONCE = 1024 * 1024
"""Number of bytes that are counted as in flight in each step, while a file of unknown size is read."""


class Counted:
    """Counts the bytes of a media item as in flight, until the item is processed."""

    def __init__(self, in_flight: BytesInFlight, field: str) -> None:
        self._in_flight, self._field = in_flight, field
        self._held: list[Held] = []
        self._uncounted = 0

    def __call__(self, size: int) -> None:
        """Count more bytes as in flight. Raises ResourceExhausted if a limit is reached."""
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
    """Reads media from their sources, such as URLs or request data."""

    def __init__(self, config: MediaConfig, metrics: MediaMetrics, resolver: Resolver | None = None) -> None:
        """Create the reader of media. ``resolver`` is used instead of the system's resolver for host names. Raises
        ConfigError.
        """
        self._config = config
        self._metrics = metrics
        self._fetcher = Fetcher(config, resolver)
        # Use a single thread, because several threads would compete with the event loop for the GIL.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="media-bytes")
        self._closed = False

    def close(self) -> None:
        """Finish the reads that are running, and refuse new reads."""
        self._closed = True
        self._fetcher.close()
        self._thread.shutdown(wait=False)

    def check(self, part: MediaPart) -> None:
        """Check a media item as far as possible without reading it from its source.

        Raises PermissionDenied for a source that is not allowed, and InvalidArgument for other problems.
        """
        if isinstance(part.source, Features) and not self._config.allow_features:
            raise sources.not_allowed(
                part.field,
                "has preprocessed tensors, but the server's setting media.allow_features is false; send the file instead",
            )
        if isinstance(part.source, Url) and not is_data_url(part.source.url):
            self._fetcher.check(part.source.url, field=part.field)

    async def look(self, content: Content, work: Callable[[], T]) -> T:
        """Return the result of ``work``, a function that reads all bytes of a media item.

        For large items, the reader runs ``work`` in a thread.
        """
        if size_of(content) <= _LONG:
            return work()
        self._check_open()
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    async def read(self, part: MediaPart, counted: "Counted") -> Content:
        """Return the content of a media item, after a check of the file format by the first bytes of the file. Raises
        RequestFailed.
        """
        source = part.source
        if isinstance(source, Features):
            size = size_of(source)
            self._check_size(size, part.field)
            counted(size)
            await self.look(source, lambda: check_tensors(source.tensors, field=part.field))
            return source
        if isinstance(source, Frames):
            if part.modality != "video":
                raise sources.unreadable(part.field, f"has frames; {part.modality} must be one file")
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
            raise sources.unreadable(part.field, "is a file; video must be given as frames")
        self._check_format(part, data)
        return EncodedFile(data)

    async def _url(self, part: MediaPart, source: Url, counted: "Counted") -> bytes:
        if is_data_url(source.url):
            return await self._data_url(part, source, counted)
        started = time.perf_counter()
        data = await self._fetcher.fetch(source.url, field=part.field, counted=counted)
        self._metrics.series("penstock:media_seconds", part.modality, "fetch").observe(time.perf_counter() - started)
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
            raise sources.unreadable(part.field, str(e)) from None
        self._check_size(len(data), part.field)
        return data

    def _check_open(self) -> None:
        if self._closed:
            raise sources.shutting_down()

    def _check_frames(self, source: Frames, field: str) -> None:
        self._check_size(size_of(source), field)
        if not source.frames:
            raise sources.unreadable(field, "has no frames")
        if (count := len(source.frames)) > self._config.max_frames:
            raise sources.too_large(field, f"has {count} frames", "media.max_frames", self._config.max_frames)
        before = 0.0
        for index, frame in enumerate(source.frames):
            if not before <= frame.timestamp < float("inf"):
                raise sources.unreadable(
                    field,
                    f"has the timestamp {frame.timestamp} at frame {index}; timestamps must be finite, ascending, and at "
                    "least 0",
                )
            before = frame.timestamp
            if not is_of("video", frame.data):
                raise sources.unreadable(field, f"has a frame {index} that is not a {_either('video')} file")

    def _check_size(self, size: int, field: str) -> None:
        if not size:
            raise sources.unreadable(field, "is empty")
        if size > self._config.max_bytes:
            raise sources.too_large(field, f"has {size} bytes", "media.max_bytes", self._config.max_bytes)

    def _check_format(self, part: MediaPart, data: bytes) -> None:
        if not is_of(part.modality, data):
            raise sources.unreadable(part.field, f"is not a {_either(part.modality)} file")


def size_of(content: Content) -> int:
    """Return the size of a media item's content in bytes."""
    if isinstance(content, EncodedFile):
        return len(content.data)
    if isinstance(content, Frames):
        return sum(len(frame.data) for frame in content.frames)
    return sum(len(tensor.data) for tensor in content.tensors.values())


def _either(modality: str) -> str:
    names = FORMATS[modality]  # type: ignore[index]  # a modality
    return f"{', '.join(names[:-1])} or {names[-1]}"
