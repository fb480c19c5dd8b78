"""Copies of blocks between a worker's part of the KV cache and host memory, which run concurrently with steps.

States of recurrent layers are copied in the same way: a slot of states counts as a block of another size.
"""

import threading
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from itertools import accumulate
from typing import Any, TypeVar

import msgspec
import numpy as np
import torch

from penstock_enginecore.kv_transfer.core.base import BlockFacts, Content, Copy
from penstock_enginecore.kv_transfer.host_memory import HostMemory
from penstock_enginecore.kv_transfer.staged_blocks import NUM_PIECES, PIECE_BYTES, StagedBlocks
from penstock_enginecore.worker.device_thread import DeviceThread
from penstock_enginecore.worker.failures import Failure
from penstock_enginecore.worker.messages import Copied, CopyBlocks, encode
from penstock_enginecore.worker.staging import CopyStream, GpuStream, StagingRing

# Copies of one worker.

T = TypeVar("T")
Call = Callable[..., "Future[Any]"]
"""Function that calls a method of ``WorkerCopies`` by name on all workers."""
Memory = Callable[[], list[torch.Tensor] | None]
"""Function that returns the tensors of the KV cache, as ``block_memory`` does, or of the states, as ``slot_memory``
does. The list is empty if the worker has no such layers. Returns None while the engine sleeps.
"""
OpenStream = Callable[[torch.device], CopyStream | None]
"""Function that returns a stream for copies from and to a device, or None for a CPU."""


def gpu_stream(device: torch.device) -> CopyStream | None:
    """Return a stream of a GPU, or None for a CPU."""
    return GpuStream(device) if device.type == "cuda" else None


class WorkerCopies:
    """Makes the copies of one worker on a separate thread, in the order of calls to ``begin``. If a copy fails, the
    future that ``begin`` returned raises the error.
    """

    def __init__(
        self,
        memory: Memory,
        *,
        checked: bool = False,
        open_stream: OpenStream = gpu_stream,
        piece_bytes: int = PIECE_BYTES,
    ) -> None:
        """Create the object without starting the thread. If ``checked`` is true, copies verify a checksum when they
        read a slot of host memory. Checksums take little time for states, because a request loads a single state.
        Blocks in host memory have no checksums.

        ``read`` and ``write`` copy blocks on a GPU through ``NUM_PIECES`` pieces of page-locked memory, each of
        ``piece_bytes`` bytes. ``prepare`` allocates the pieces, or else the first of these calls.
        """
        self._memory = memory
        self._open_stream = open_stream
        self._piece_bytes = piece_bytes
        self._stream: CopyStream | None = None
        self._staged: StagedBlocks | None = None  # Only the copy thread uses this attribute.
        self._checksums: dict[int, int] | None = {} if checked else None
        self._thread: DeviceThread | None = None
        self._lock = threading.Lock()  # Protects the creation of the thread.
        self._host: HostMemory | None = None

    @property
    def block_bytes(self) -> int:
        """Size in bytes of the worker's part of a block."""
        return sum(tensor.shape[1] for tensor in self._memory() or ())

    def begin(self, method: str, *arguments: Any) -> "Future[Any]":
        """Call a method of this class on the copy thread, and return a future of its result. On a GPU, the method's
        copies run after all work that the calling thread has launched before.
        """
        memory = self._memory()
        with self._lock:
            if self._stream is None and memory:
                self._stream = self._open_stream(memory[0].device)
            stream = self._stream if memory else None
            if self._thread is None:
                self._thread = DeviceThread("kv copies")
        ready = None if stream is None else stream.launched()
        return self._thread.submit(partial(self._run, memory, stream, ready, getattr(self, method), arguments))

    def stop(self) -> None:
        """Free the slots of host memory and end the copy thread, after pending copies. Does not wait."""
        if self._thread is not None:
            self._thread.submit(self._free)
            self._thread.stop()

    def _run(
        self,
        memory: list[torch.Tensor] | None,
        stream: CopyStream | None,
        ready: Any,
        call: Callable[..., T],
        arguments: Sequence[Any],
    ) -> T:
        if memory is None:
            raise RuntimeError("the KV cache is not allocated, or the engine sleeps")
        if stream is None:
            return call(memory, *arguments)
        with stream.after(ready):
            try:
                return call(memory, *arguments)
            finally:  # Also after an error, no work may use blocks that the caller frees.
                stream.wait(stream.mark())

    # Methods that run on the copy thread.

    def reserve(self, memory: list[torch.Tensor], num_slots: int) -> None:
        """Allocate the slots of host memory. Slots of an earlier call are freed first."""
        self._free()
        self._host = HostMemory(num_slots, sum(tensor.shape[1] for tensor in memory), pinned=_is_on_gpu(memory))

    def prepare(self, memory: list[torch.Tensor]) -> None:
        """Lock the memory that ``read`` and ``write`` need, because kernel launches wait while the driver locks it."""
        self._staging(memory)

    def save(self, memory: list[torch.Tensor], copies: Sequence[Copy]) -> None:
        for tensor, part in _parts(memory, self._slots()):
            if tensor.is_cuda:
                for block_id, slot in copies:
                    part[slot].copy_(tensor[block_id], non_blocking=True)
            else:  # numpy copies a row in half of the time that torch needs.
                blocks, slots = tensor.numpy(), part.numpy()
                for block_id, slot in copies:
                    slots[slot] = blocks[block_id]
        if self._checksums is not None:
            if _is_on_gpu(memory):
                torch.cuda.current_stream(memory[0].device).synchronize()
            for _, slot in copies:
                self._checksums[slot] = self._checksum(slot)

    def load(self, memory: list[torch.Tensor], copies: Sequence[Copy]) -> list[int]:
        """Copy blocks from slots of host memory to the pool. Return the slots whose content is damaged. The blocks of
        these slots are not written.
        """
        damaged = [slot for _, slot in copies if self._damaged(slot)]
        copies = [copy for copy in copies if copy.slot not in damaged]
        for tensor, part in _parts(memory, self._slots()):
            if tensor.is_cuda:
                for block_id, slot in copies:
                    tensor[block_id].copy_(part[slot], non_blocking=True)
            else:
                blocks, slots = tensor.numpy(), part.numpy()
                for block_id, slot in copies:
                    blocks[block_id] = slots[slot]
        return damaged

    def read(self, memory: list[torch.Tensor], block_ids: Sequence[int]) -> Sequence[Content]:
        """Return the contents of blocks of the pool."""
        if (staged := self._staging(memory)) is not None:
            return staged.read(memory, block_ids)
        arrays = [
            tensor.numpy() for tensor in memory
        ]  # Join the arrays directly, so that each byte is copied only once.
        return [b"".join([array[block_id] for array in arrays]) for block_id in block_ids]

    def write(self, memory: list[torch.Tensor], block_ids: Sequence[int], contents: Sequence[Content]) -> None:
        """Write ``contents`` to blocks of the pool."""
        if (staged := self._staging(memory)) is not None:
            staged.write(memory, block_ids, contents)
            return
        ends = list(accumulate(tensor.shape[1] for tensor in memory))
        parts = [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]
        arrays = [tensor.numpy() for tensor in memory]
        for block_id, content in zip(block_ids, contents, strict=True):
            row = np.frombuffer(content, dtype=np.uint8)
            for array, part in zip(arrays, parts, strict=True):
                array[block_id] = row[part]

    def read_slots(self, _: list[torch.Tensor], slots: Sequence[int]) -> list[bytes | None]:
        """Return the bytes of slots, and None for a damaged slot."""
        host = self._slots()
        return [None if self._damaged(slot) else host[slot].numpy().tobytes() for slot in slots]

    def write_slots(self, _: list[torch.Tensor], slots: Sequence[int], contents: Sequence[Content]) -> None:
        """Write ``contents`` to slots of host memory."""
        host = self._slots()
        for slot, content in zip(slots, contents, strict=True):
            host.numpy()[slot] = np.frombuffer(content, dtype=np.uint8)
            if self._checksums is not None:
                self._checksums[slot] = self._checksum(slot)

    def _free(self) -> None:
        if self._host is not None:
            self._host.close()
            self._host = None

    def _staging(self, memory: list[torch.Tensor]) -> StagedBlocks | None:
        """Return the copies through page-locked memory, or None for a CPU."""
        if self._stream is None or not memory:
            return None
        if self._staged is None:
            self._staged = StagedBlocks(StagingRing(NUM_PIECES, self._piece_bytes, self._stream, memory[0].device))
        return self._staged

    def _checksum(self, slot: int) -> int:
        return zlib.crc32(self._slots()[slot].numpy().data)

    def _damaged(self, slot: int) -> bool:
        """Return whether the content of a slot has changed since it was written. The result is always False without
        checksums.
        """
        return self._checksums is not None and self._checksums.get(slot) != self._checksum(slot)

    def _slots(self) -> torch.Tensor:
        if self._host is None:
            raise RuntimeError("a slot of host memory was used before reserve was called")
        return self._host.slots


def _is_on_gpu(memory: list[torch.Tensor]) -> bool:
    return bool(memory) and memory[0].is_cuda


def _parts(memory: list[torch.Tensor], rows: torch.Tensor) -> "zip[tuple[torch.Tensor, torch.Tensor]]":
    """Return pairs of a tensor of the pool and the columns of ``rows`` with the data of that tensor. Each row contains
    one block.
    """
    return zip(memory, torch.split(rows, [tensor.shape[1] for tensor in memory], dim=1), strict=True)


class Copier:
    """A ``BlockCopier`` that makes all copies through ``call``. ``facts`` describes a complete block, over all
    workers.
    """

    def __init__(self, call: Call, facts: BlockFacts) -> None:
        self._call = call
        self.block_bytes, self.order, self.numerics = facts

    def reserve(self, num_slots: int) -> "Future[None]":
        return self._call("reserve", num_slots)

    def save(self, copies: Sequence[Copy]) -> "Future[None]":
        return self._call("save", copies)

    def load(self, copies: Sequence[Copy]) -> "Future[list[int]]":
        return self._call("load", copies)

    def read(self, block_ids: Sequence[int]) -> "Future[list[Content]]":
        return self._call("read", block_ids)

    def write(self, block_ids: Sequence[int], contents: Sequence[Content]) -> "Future[None]":
        return self._call("write", block_ids, contents)

    def read_slots(self, slots: Sequence[int]) -> "Future[list[bytes | None]]":
        return self._call("read_slots", slots)

    def write_slots(self, slots: Sequence[int], contents: Sequence[Content]) -> "Future[None]":
        return self._call("write_slots", slots, contents)


# Records of copies: on the engine's side, copies whose results have not arrived from all workers; on a worker's side,
# copies in flight.

Send = Callable[[CopyBlocks], None]
_OF_BYTES = ("read", "read_slots")
"""Methods that return the bytes of blocks. Each worker returns its part, or None if the part is damaged."""
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
    """Copies of KV blocks or states for which not all workers have sent their results yet. Thread-safe."""

    def __init__(self, num_workers: int, send: Send) -> None:
        self._num_workers = num_workers
        self._send = send
        self._lock = threading.Lock()
        self._last = 0
        self._waiting: dict[int, tuple[str, Future[Any], dict[int, bytes | Exception]]] = {}
        self._failed: Exception | None = None

    def call(self, of_states: bool, method: str, *arguments: Any) -> "Future[Any]":
        """Start a copy of blocks or states on all workers. The returned future completes when all workers have
        answered. If workers failed, the future raises the error of the failed worker with the lowest rank.
        """
        future: Future[Any] = Future()
        with self._lock:
            self._last += 1
            number = self._last
            if self._failed is not None:
                future.set_exception(self._failed)
                return future
            self._waiting[number] = method, future, {}
        try:
            self._send(CopyBlocks(number, of_states, method, encode(arguments)))
        except Exception as e:
            with self._lock:
                known = self._waiting.pop(number, None)
            if known is not None:
                future.set_exception(e)
        return future

    def answered(self, rank: int, number: int, outcome: bytes | Exception) -> None:
        """Handle a worker's answer to a copy. Answers with an unknown number are ignored."""
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
        elif method == "load":
            future.set_result(
                sorted({slot for value in values for slot in msgspec.msgpack.decode(value, type=list[int])})
            )
        elif method in _OF_BYTES:
            parts = [msgspec.msgpack.decode(value, type=list[bytes | None]) for value in values]
            future.set_result([_joined(of_block) for of_block in zip(*parts, strict=True)])
        else:
            future.set_result(None)

    def fail(self, error: Exception) -> None:
        """Fail all current and future copies with ``error``, because the workers will send no more answers."""
        with self._lock:
            self._failed = self._failed or error
            waiting = [future for _, future, _ in self._waiting.values()]
            self._waiting.clear()
        for future in waiting:
            future.set_exception(error)


class CopiesUnderWay:
    """Copies in flight at one worker. Only the worker's thread may call the methods."""

    LOOK = 0.0005
    """Time in seconds between two checks whether copies in flight are done."""

    def __init__(self) -> None:
        self._copies: deque[tuple[int, Future[Any]]] = deque()

    def __bool__(self) -> bool:
        return bool(self._copies)

    def begin(self, call: CopyBlocks, copies: WorkerCopies, start: int) -> None:
        """Begin a copy, which runs after all work that was launched on the device before this call. The worker's part
        of a block starts at byte ``start``.
        """
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
        """Yield the answers of finished copies, in call order."""
        while self._copies and self._copies[0][1].done():
            number, future = self._copies.popleft()
            error = future.exception()
            yield Copied(number, encode(future.result()) if error is None else Failure.of(error))


def _joined(parts: Sequence[bytes | None]) -> bytes | None:
    """Return a block of the parts of all workers, or None if a part is damaged."""
    whole = [part for part in parts if part is not None]
    return b"".join(whole) if len(whole) == len(parts) else None


def _own(contents: Sequence[bytes], start: int, size: int) -> list[memoryview]:
    return [memoryview(content)[start : start + size] for content in contents]
