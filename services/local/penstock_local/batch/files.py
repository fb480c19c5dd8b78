"""Files of a batch, local or opened by fsspec, with lines in OpenAI's batch format."""

import codecs
import fcntl
import hashlib
import importlib
import itertools
import os
from array import array
from collections.abc import Collection, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

import msgspec

from penstock_common.errors import ConfigError, InvalidArgument, RequestFailed, nearest, quoted
from penstock_common.files import open_private


def is_url(path: str) -> bool:
    """Return whether ``path`` is a URL for fsspec."""
    return "://" in path


def open_input(path: str) -> BinaryIO:
    """Open the input file. Raises ConfigError if the file cannot be opened."""
    try:
        if is_url(path):
            remote: BinaryIO = _fsspec().open(path, "rb").open()
            return remote
        return Path(path).open("rb")
    except IsADirectoryError:
        raise ConfigError(f"{path} is a directory, not a file of requests") from None
    except OSError as e:
        raise ConfigError(f"{path} cannot be read: {e.strerror or e}") from None
    except (ValueError, ImportError) as e:  # The URL's protocol is unknown, or its package is missing.
        raise ConfigError(f"{path} cannot be read: {e}") from None


class OutputFile:
    """Output file to which complete lines are appended. Only one program can have the file open.

    If a killed program has left an incomplete last line, this line is removed. If the path is a URL, lines are
    collected in a local file, which is uploaded when the batch is done.
    """

    def __init__(self, path: str, *, overwrite: bool) -> None:
        """Open and lock the file. Raises ConfigError if it cannot be written or another program writes it."""
        self.path = path
        self.local = _gathered(path) if is_url(path) else Path(path)
        try:
            if is_url(path):
                self.local.parent.mkdir(parents=True, exist_ok=True)
                self._file = os.fdopen(open_private(self.local), "ab+")
            else:  # a local path may be a symbolic link, because the user has chosen it
                self._file = self.local.open("ab+")
        except OSError as e:
            raise ConfigError(f"{path} cannot be written: {e.strerror or e}") from None
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._file.close()
            raise ConfigError(f"{path} is being written by another program") from None
        if overwrite:
            self._file.truncate(0)
        self._cut()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def lines(self) -> Iterator[bytes]:
        """Yield the lines that are already in the file."""
        self._file.seek(0)
        yield from self._file

    def add(self, line: bytes) -> None:
        """Append a line. When this method returns, the line survives a crash of this program."""
        self._file.write(line)
        self._file.flush()

    def clear(self) -> None:
        """Drop all lines."""
        self._file.truncate(0)

    def finish(self) -> None:
        """Sync the complete file to disk, and upload it if the path is a URL. Raises ConfigError if the upload fails."""
        os.fsync(self._file.fileno())
        if not is_url(self.path):
            return
        try:
            with _fsspec().open(self.path, "wb") as target:
                for line in self.lines():
                    target.write(line)
        except OSError as e:
            raise ConfigError(
                f"{self.path} cannot be written: {e}; the lines of this file are in {self.local}"
            ) from None
        self.local.unlink()

    def remove_if_empty(self) -> None:
        """Remove the file if it is empty."""
        if not self.local.stat().st_size:
            self.local.unlink()

    def _cut(self) -> None:
        size = end = self._file.seek(0, os.SEEK_END)
        while end:
            start = max(0, end - 65_536)
            self._file.seek(start)
            newline = self._file.read(end - start).rfind(b"\n")
            if newline >= 0:
                end = start + newline + 1
                break
            end = start
        if end < size:
            self._file.truncate(end)
        self._file.seek(0, os.SEEK_END)


def _gathered(path: str) -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "penstock" / "batch" / f"{hashlib.sha256(path.encode()).hexdigest()[:16]}.jsonl"


def _fsspec() -> Any:
    try:
        return importlib.import_module("fsspec")
    except ImportError:
        raise ConfigError("URLs need the package fsspec: pip install 'penstock[fsspec]'") from None


class BatchRequest(msgspec.Struct, frozen=True):
    """A request ready to be sent. ``number`` is its line number, from 1."""

    number: int
    custom_id: str
    url: str
    body: bytes


class _Line(msgspec.Struct, frozen=True):
    custom_id: str
    url: str
    body: msgspec.Raw
    method: str = "POST"


class _Body(msgspec.Struct, frozen=True):
    stream: bool | None = None
    input: msgspec.Raw = msgspec.Raw()
    messages: msgspec.Raw = msgspec.Raw()


class _Named(msgspec.Struct, frozen=True):
    custom_id: str = ""


_CHAT, _RESPONSES = "/v1/chat/completions", "/v1/responses"
_NO_RESPONSES = (
    f"for {_CHAT}, use body.messages instead of input, a message with the role system instead of instructions, "
    "and max_completion_tokens instead of max_output_tokens"
)
"""Advice for lines that use the responses API. A batch does not support that API, because it stores no responses."""
_LINES = msgspec.json.Decoder(_Line)
_BODIES = msgspec.json.Decoder(_Body)
_NAMES = msgspec.json.Decoder(_Named)


def custom_id_of(line: bytes) -> str:
    """Return the ``custom_id`` of a line, even if the rest of the line is invalid, or '' if the line has no id."""
    try:
        return _NAMES.decode(line).custom_id
    except (msgspec.DecodeError, UnicodeDecodeError):
        return ""


def request_of(line: bytes, number: int, urls: Collection[str]) -> BatchRequest:
    """Parse the request of a line. ``urls`` are the known URLs. Raises InvalidArgument if the line is invalid."""
    try:
        given = _LINES.decode(line)
    except msgspec.ValidationError as e:
        raise _wrong(f"{str(e)[:1].lower()}{str(e)[1:]}", "INVALID_TYPE") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as e:
        raise _wrong(f"not valid JSON: {e}", "INVALID_JSON") from None
    if not given.custom_id:
        raise _wrong("custom_id is empty", "MISSING_FIELD", "custom_id")
    if given.method != "POST":
        raise _wrong(f"method is {given.method!r}; it must be 'POST'", "INVALID_FIELD", "method")
    if given.url not in urls:
        hint = f"; {_NO_RESPONSES}" if given.url.rstrip("/") == _RESPONSES else nearest(given.url, urls)
        raise _wrong(f"url is {given.url!r}; known: {', '.join(urls)}{hint}", "UNKNOWN_URL", "url")
    try:
        body = _BODIES.decode(given.body)
    except msgspec.DecodeError as e:
        raise _wrong(f"body: {str(e)[:1].lower()}{str(e)[1:]}", "INVALID_TYPE", "body") from None
    if given.url == _CHAT and _is_set(body.input) and not _is_set(body.messages):
        raise _wrong(f"body.input is set, as for {_RESPONSES}; {_NO_RESPONSES}", "INVALID_FIELD", "body.input")
    if body.stream:
        raise _wrong(
            "body.stream is true; a batch has complete answers, so body.stream must be false or unset",
            "INVALID_FIELD",
            "body.stream",
        )
    return BatchRequest(number, given.custom_id, given.url, bytes(given.body))


def _is_set(value: msgspec.Raw) -> bool:
    return bytes(value) not in (b"", b"null")


def _wrong(message: str, reason: str, field: str = "") -> InvalidArgument:
    return InvalidArgument(message, field=field, reason=reason)


_DIGEST = 8


class InputFile:
    """Input file of a batch.

    Stores an 8-byte digest of each line's ``custom_id``, to recognize lines and to find duplicates. ``total`` is the
    number of lines that are not blank.

    Raises:
        ConfigError: The file cannot be read, has no lines, or has two lines with the same ``custom_id``.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.total = 0
        self._digests = array("Q")
        for line in self._read():
            self.total += bool(line.strip())
            self._digests.append(_digest(custom_id_of(line)))
        if not self.total:
            raise ConfigError(f"{path} has no lines: there is nothing to do")
        self._check_names()

    def is_line(self, number: int, custom_id: str) -> bool:
        """Return whether line ``number``, from 1, has this ``custom_id``."""
        return 1 <= number <= len(self._digests) and self._digests[number - 1] == _digest(custom_id)

    def lines(self) -> Iterator[tuple[int, bytes]]:
        """Yield each line that is not blank, with its number."""
        yield from ((number, line) for number, line in enumerate(self._read(), start=1) if line.strip())

    def _check_names(self) -> None:
        several = {a for a, b in itertools.pairwise(sorted(self._digests)) if a == b} - {_digest("")}
        if not several:
            return
        first: dict[str, int] = {}
        for number, line in self.lines():
            if number > len(self._digests) or self._digests[number - 1] not in several:
                continue
            name = custom_id_of(line)
            if (earlier := first.setdefault(name, number)) != number:
                raise ConfigError(
                    f"{self.path}: line {number} has the same custom_id {quoted(name)} as line {earlier}; the custom_id "
                    "identifies the answer, so each line needs a different custom_id"
                )

    def _read(self) -> Iterator[bytes]:
        """Yield the lines, without a byte-order mark."""
        with open_input(self.path) as file:
            for number, line in enumerate(file):
                yield line if number else line.removeprefix(codecs.BOM_UTF8)


def _digest(custom_id: str) -> int:
    return int.from_bytes(
        hashlib.blake2b(custom_id.encode(errors="surrogatepass"), digest_size=_DIGEST).digest(), "little"
    )


_PREFIX = "batch_req_"


class BatchResponse(msgspec.Struct, frozen=True):
    """HTTP answer to a line."""

    status_code: int
    request_id: str
    body: msgspec.Raw


class BatchError(msgspec.Struct, frozen=True):
    """Reason why a line has no answer."""

    code: str
    message: str


class BatchRecord(msgspec.Struct, frozen=True):
    """Result of a line. ``id`` contains the line number, so that a later run of the batch knows the finished lines."""

    id: str
    custom_id: str
    response: BatchResponse | None = None
    error: BatchError | None = None

    @property
    def ok(self) -> bool:
        """Whether the record belongs in the output file. Other records belong in the error file."""
        return self.response is not None and self.response.status_code == 200


class _Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Used(msgspec.Struct, frozen=True):
    usage: _Usage | None = None


class _Done(msgspec.Struct, frozen=True):
    id: str
    custom_id: str


_DONE = msgspec.json.Decoder(_Done)
_USED = msgspec.json.Decoder(_Used)
_ENCODER = msgspec.json.Encoder()


def answered(number: int, custom_id: str, response: BatchResponse) -> BatchRecord:
    """Return the record of an answered line."""
    return BatchRecord(f"{_PREFIX}{number}", custom_id, response)


def failed(number: int, custom_id: str, error: RequestFailed) -> BatchRecord:
    """Return the record of a line without an answer."""
    return BatchRecord(f"{_PREFIX}{number}", custom_id, error=BatchError(error.reason.lower(), error.message))


def tokens_of(record: BatchRecord) -> tuple[int, int]:
    """Return the numbers of prompt and output tokens that the answer reports, or 0 and 0 if it reports none."""
    if record.response is None:
        return 0, 0
    try:
        usage = _USED.decode(record.response.body).usage
    except msgspec.ValidationError:  # the answer has no usage in the expected form
        usage = None
    return (usage.prompt_tokens, usage.completion_tokens) if usage is not None else (0, 0)


def encoded(record: BatchRecord) -> bytes:
    """Encode the record as a line."""
    return _ENCODER.encode(record) + b"\n"


def done_line(line: bytes) -> tuple[int, str]:
    """Parse the line number and ``custom_id`` of a record. Raises ValueError if the line is not a record."""
    done = _DONE.decode(line)
    return int(done.id.removeprefix(_PREFIX)), done.custom_id
