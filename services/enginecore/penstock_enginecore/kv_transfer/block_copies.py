"""Copies of blocks that the engine waits for while its workers make them, and those that a worker makes while it computes."""

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import msgspec

from penstock_enginecore.kv_transfer.core.copier import Copy
from penstock_enginecore.kv_transfer.kv_copy import WorkerCopies
from penstock_enginecore.worker.failures import Failure
from penstock_enginecore.worker.messages import Copied, CopyBlocks, encode

Send = Callable[[CopyBlocks], None]
_OF_BYTES = ("read", "read_slots")
"""Methods that give the bytes of blocks, a part of each at every worker."""
_TYPES: dict[str, Any] = {
    "reserve": tuple[int],
    "save": tuple[list[Copy]],
    "load": tuple[list[Copy]],
    "read": tuple[list[int]],
    "write": tuple[list[int], list[bytes]],
    "read_slots": tuple[list[int]],
    "write_slots": tuple[list[int], list[bytes]],
}


class CopiesAwaited:
    """Copies that workers have not all answered. From any thread."""

    def __init__(self, num_workers: int, send: Send) -> None:
        self._num_workers = num_workers
        self._send = send
        self._lock = threading.Lock()
        self._last = 0
        self._waiting: dict[int, tuple[str, Future[Any], dict[int, bytes | Exception]]] = {}
        self._failed: Exception | None = None

    def call(self, method: str, *arguments: Any) -> "Future[Any]":
        """Have all workers make a copy. The future raises the error of the first that has one, once all have answered."""
        future: Future[Any] = Future()
        with self._lock:
            self._last += 1
            number = self._last
            if self._failed is not None:
                future.set_exception(self._failed)
                return future
            self._waiting[number] = method, future, {}
        try:
            self._send(CopyBlocks(number, method, encode(arguments)))
        except Exception as e:
            with self._lock:
                known = self._waiting.pop(number, None)
            if known is not None:
                future.set_exception(e)
        return future

    def answered(self, rank: int, number: int, outcome: bytes | Exception) -> None:
        """A worker's answer. Numbers that are not waited for are ignored."""
        with self._lock:
            if number not in self._waiting:
                return
            method, future, outcomes = self._waiting[number]
            outcomes[rank] = outcome
            if len(outcomes) < self._num_workers:
                return
            del self._waiting[number]
        by_rank = [outcomes[rank] for rank in sorted(outcomes)]
        values = [outcome for outcome in by_rank if isinstance(outcome, bytes)]
        error = next((outcome for outcome in by_rank if isinstance(outcome, Exception)), None)
        if error is not None:
            future.set_exception(error)
        elif method in _OF_BYTES:
            parts = [msgspec.msgpack.decode(value, type=list[bytes]) for value in values]
            future.set_result([b"".join(of_block) for of_block in zip(*parts, strict=True)])
        else:
            future.set_result(None)

    def fail(self, error: Exception) -> None:
        """Nothing is answered any more: end every copy, also those to come, with ``error``."""
        with self._lock:
            self._failed = self._failed or error
            waiting = [future for _, future, _ in self._waiting.values()]
            self._waiting.clear()
        for future in waiting:
            future.set_exception(error)


class CopiesUnderWay:
    """Of one worker, whose part of a block begins ``start()`` bytes behind the block's begin. Its thread calls all methods."""

    LOOK = 0.0005
    """Seconds between two looks at what is being copied."""

    def __init__(self) -> None:
        self._copies: deque[tuple[int, Future[Any]]] = deque()

    def __bool__(self) -> bool:
        return bool(self._copies)

    def begin(self, call: CopyBlocks, copies: WorkerCopies, start: int) -> None:
        """Begin a copy, behind what the device was told before."""
        future: Future[Any]
        try:
            arguments = msgspec.msgpack.decode(call.arguments, type=_TYPES[call.method])
            if call.method in ("write", "write_slots"):
                arguments = arguments[0], _own(arguments[1], start, copies.block_bytes)
            future = copies.begin(call.method, *arguments)
        except Exception as e:
            future = Future()
            future.set_exception(e)
        self._copies.append((call.number, future))

    def take(self) -> Iterator[Copied]:
        """The answers to what is over, in the order of the calls."""
        while self._copies and self._copies[0][1].done():
            number, future = self._copies.popleft()
            error = future.exception()
            yield Copied(number, encode(future.result()) if error is None else Failure.of(error))


def _own(contents: Sequence[bytes], start: int, size: int) -> list[memoryview]:
    return [memoryview(content)[start : start + size] for content in contents]
