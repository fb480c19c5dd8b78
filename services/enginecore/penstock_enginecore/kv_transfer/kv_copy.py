"""Copies of blocks between a worker's part of the KV cache and host memory, beside its steps, which the engine waits for."""

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from itertools import accumulate
from typing import Any, TypeVar

import msgspec
import numpy as np
import torch

from penstock_enginecore.kv_transfer.core.base import BlockFacts, Copy
from penstock_enginecore.worker.device_thread import DeviceThread
from penstock_enginecore.worker.failures import Failure
from penstock_enginecore.worker.messages import Copied, CopyBlocks, encode

_TOUCHED = 64 << 20
"""Bytes that are touched at once."""


class HostMemory:
    """``[num_slots, slot_bytes]``, uint8. All of it is there from the start: nothing waits for a page while it is copied to.
    ``pinned``: page-locked, for a device that copies to it. Raises MemoryError where there is not as much.
    """

    def __init__(self, num_slots: int, slot_bytes: int, *, pinned: bool) -> None:
        try:
            self.slots = torch.empty(num_slots, slot_bytes, dtype=torch.uint8, pin_memory=pinned)
        except RuntimeError as e:
            raise MemoryError(f"{num_slots} slots of {slot_bytes} bytes of host memory: {e}") from e
        if not pinned:
            flat = self.slots.view(-1)
            for start in range(0, len(flat), _TOUCHED):
                flat[start : start + _TOUCHED].zero_()


# A worker's part.

T = TypeVar("T")
Call = Callable[..., "Future[Any]"]
"""Has a method of ``WorkerCopies`` called by its name, at all workers."""
Memory = Callable[[], list[torch.Tensor]]
"""The KV cache, as ``block_memory`` gives it; empty while it sleeps."""


class WorkerCopies:
    """Copies are made on a thread of their own, in the order of ``begin``, whose future raises what went wrong."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._thread: DeviceThread | None = None
        self._lock = threading.Lock()  # of making it
        self._host: HostMemory | None = None

    @property
    def block_bytes(self) -> int:
        """Of the worker's part of a block."""
        return sum(tensor.shape[1] for tensor in self._memory())

    def begin(self, method: str, *arguments: Any) -> "Future[Any]":
        """Have a method of this class called, behind what the device of a GPU's worker was told by the calling thread before."""
        memory = self._memory()
        ready: Any = None
        if memory and memory[0].is_cuda:
            make_event: Any = torch.cuda.Event
            ready = make_event()
            ready.record(torch.cuda.current_stream(memory[0].device))
        with self._lock:
            if self._thread is None:
                self._thread = DeviceThread("kv copies")
        return self._thread.submit(partial(self._run, memory, ready, getattr(self, method), arguments))

    def stop(self) -> None:
        """End the thread behind what was begun."""
        if self._thread is not None:
            self._thread.stop()

    def _run(self, memory: list[torch.Tensor], ready: Any, call: Callable[..., T], arguments: Sequence[Any]) -> T:
        if not memory:
            raise RuntimeError("there is no KV cache")
        if ready is None:
            return call(memory, *arguments)
        make_stream: Any = torch.cuda.Stream
        stream = make_stream(memory[0].device)
        with torch.cuda.stream(stream):
            stream.wait_event(ready)
            result = call(memory, *arguments)
            stream.synchronize()
        return result

    # On the thread.

    def reserve(self, memory: list[torch.Tensor], num_slots: int) -> None:
        """Allocate the host's slots."""
        self._host = HostMemory(num_slots, sum(tensor.shape[1] for tensor in memory), pinned=memory[0].is_cuda)

    def save(self, memory: list[torch.Tensor], copies: Sequence[Copy]) -> None:
        for tensor, part in _parts(memory, self._slots()):
            if tensor.is_cuda:
                for block_id, slot in copies:
                    part[slot].copy_(tensor[block_id], non_blocking=True)
            else:  # numpy takes half of torch's time for a row
                blocks, slots = tensor.numpy(), part.numpy()
                for block_id, slot in copies:
                    slots[slot] = blocks[block_id]

    def load(self, memory: list[torch.Tensor], copies: Sequence[Copy]) -> None:
        for tensor, part in _parts(memory, self._slots()):
            if tensor.is_cuda:
                for block_id, slot in copies:
                    tensor[block_id].copy_(part[slot], non_blocking=True)
            else:
                blocks, slots = tensor.numpy(), part.numpy()
                for block_id, slot in copies:
                    blocks[block_id] = slots[slot]

    def read(self, memory: list[torch.Tensor], block_ids: Sequence[int]) -> list[bytes]:
        """The bytes of blocks of the pool."""
        if memory[0].is_cuda:
            return [b"".join(tensor[block_id].cpu().numpy().tobytes() for tensor in memory) for block_id in block_ids]
        arrays = [tensor.numpy() for tensor in memory]  # joined as they are: each byte is copied once
        return [b"".join([array[block_id] for array in arrays]) for block_id in block_ids]

    def write(
        self, memory: list[torch.Tensor], block_ids: Sequence[int], contents: "Sequence[bytes | memoryview]"
    ) -> None:
        """Bytes into blocks of the pool."""
        ends = list(accumulate(tensor.shape[1] for tensor in memory))
        parts = [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]
        arrays = None if memory[0].is_cuda else [tensor.numpy() for tensor in memory]
        for block_id, content in zip(block_ids, contents, strict=True):
            row = np.frombuffer(content, dtype=np.uint8)
            if arrays is not None:
                for array, part in zip(arrays, parts, strict=True):
                    array[block_id] = row[part]
            else:
                for tensor, part in zip(memory, parts, strict=True):
                    tensor[block_id].copy_(torch.from_numpy(row[part].copy()))

    def read_slots(self, _: list[torch.Tensor], slots: Sequence[int]) -> list[bytes]:
        """The bytes of slots."""
        host = self._slots()
        return [host[slot].numpy().tobytes() for slot in slots]

    def write_slots(
        self, _: list[torch.Tensor], slots: Sequence[int], contents: "Sequence[bytes | memoryview]"
    ) -> None:
        """Bytes into slots."""
        host = self._slots()
        for slot, content in zip(slots, contents, strict=True):
            host.numpy()[slot] = np.frombuffer(content, dtype=np.uint8)

    def _slots(self) -> torch.Tensor:
        if self._host is None:
            raise RuntimeError("reserve must come before the first slot is used")
        return self._host.slots


def _parts(memory: list[torch.Tensor], rows: torch.Tensor) -> "zip[tuple[torch.Tensor, torch.Tensor]]":
    """Each tensor of the pool, and its part of rows that hold a block each."""
    return zip(memory, torch.split(rows, [tensor.shape[1] for tensor in memory], dim=1), strict=True)


class Copier:
    """A ``BlockCopier`` by what ``call`` does, of blocks that are as ``facts`` says over all workers."""

    def __init__(self, call: Call, facts: BlockFacts) -> None:
        self._call = call
        self.block_bytes, self.order, self.numerics = facts

    def reserve(self, num_slots: int) -> "Future[None]":
        return self._call("reserve", num_slots)

    def save(self, copies: Sequence[Copy]) -> "Future[None]":
        return self._call("save", copies)

    def load(self, copies: Sequence[Copy]) -> "Future[None]":
        return self._call("load", copies)

    def read(self, block_ids: Sequence[int]) -> "Future[list[bytes]]":
        return self._call("read", block_ids)

    def write(self, block_ids: Sequence[int], contents: "Sequence[bytes | memoryview]") -> "Future[None]":
        return self._call("write", block_ids, contents)

    def read_slots(self, slots: Sequence[int]) -> "Future[list[bytes]]":
        return self._call("read_slots", slots)

    def write_slots(self, slots: Sequence[int], contents: "Sequence[bytes | memoryview]") -> "Future[None]":
        return self._call("write_slots", slots, contents)


# Copies of blocks that the engine waits for while its workers make them, and those that a worker makes while it computes.

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
