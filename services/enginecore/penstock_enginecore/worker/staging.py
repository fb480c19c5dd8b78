"""Copies between pageable host memory and a GPU through a small ring of page-locked host memory.

A GPU copies page-locked memory at full speed and without the help of a CPU. To lock pages, the driver holds a lock for
which kernel launches of all threads wait. The ring is therefore locked once, and all copies of its owner use the ring.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch

from penstock_enginecore.worker.device_thread import use_device

Work = Callable[[], Any]
"""Function that launches work on the current stream of the calling thread."""


class CopyStream(Protocol):
    """Stream of a device for copies, which run concurrently with steps. An event marks the end of launched work."""

    def launched(self) -> Any:
        """Return an event of all work that the calling thread has launched on its current stream. Any thread may call
        this method.
        """

    def after(self, event: Any) -> AbstractContextManager[None]:
        """Return a context in which ``launch`` and ``mark`` may be called. Work that is launched in this context starts
        after ``event``.
        """

    def launch(self, work: Work) -> None:
        """Launch work on this stream, after all work that was launched before. Does not wait for the work."""

    def mark(self) -> Any:
        """Return an event of all work that was launched on this stream."""

    def wait(self, event: Any) -> None:
        """Block the calling thread until ``event``. Raises the error of the work."""

    def join(self, event: Any) -> None:
        """Make work that the calling thread launches on its current stream start after ``event``. Does not block the
        calling thread.
        """


class GpuStream:
    """``CopyStream`` of a GPU."""

    def __init__(self, device: torch.device) -> None:
        make_stream: Any = torch.cuda.Stream
        self._device = device
        self._stream: Any = make_stream(device)

    def launched(self) -> Any:
        """Return a CUDA event of all work on the calling thread's current stream."""
        return self._event(torch.cuda.current_stream(self._device))

    @contextmanager
    def after(self, event: Any) -> Iterator[None]:
        """Make this stream the current stream of the calling thread, and let the stream wait for ``event``."""
        use_device(self._device)
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(event)
            yield

    def launch(self, work: Work) -> None:
        """Call ``work``, because this stream is the current stream."""
        work()

    def mark(self) -> Any:
        """Return a CUDA event of all work on this stream."""
        return self._event(self._stream)

    def wait(self, event: Any) -> None:
        """Wait for a CUDA event, without using CPU time."""
        event.synchronize()

    def join(self, event: Any) -> None:
        """Make the calling thread's current stream wait for a CUDA event."""
        torch.cuda.current_stream(self._device).wait_event(event)

    def _event(self, stream: Any) -> Any:
        make_event: Any = torch.cuda.Event
        event = make_event(blocking=True)
        event.record(stream)
        return event


class Piece:
    """Part of a ring's memory, uint8 ``[piece_bytes]``, and the work that uses this memory."""

    def __init__(self, memory: torch.Tensor, stream: CopyStream) -> None:
        self.memory = memory
        self._stream = stream
        self._end: Any = None

    def launch(self, work: Work) -> None:
        """Launch work that uses the memory. If ``work`` raises an error, ``wait`` still waits for the launched part."""
        try:
            self._stream.launch(work)
        finally:
            self._end = self._stream.mark()

    def wait(self) -> None:
        """Wait until no work uses the memory. Raises the error of the work."""
        if self._end is not None:
            self._stream.wait(self._end)
            self._end = None


class StagingRing:
    """Ring of ``num_pieces`` pieces of ``piece_bytes`` bytes of host memory, through which one thread copies.

    The memory is page-locked if ``device`` is a GPU. The current device must then be ``device``. torch's allocator
    locks the memory, so memory of an earlier ring of the same size is used again. Use powers of two, because this
    allocator rounds sizes up.

    Raises MemoryError if the driver cannot lock the memory.
    """

    def __init__(self, num_pieces: int, piece_bytes: int, stream: CopyStream, device: torch.device) -> None:
        self.piece_bytes = piece_bytes
        self.num_pieces = num_pieces
        # The thread that copies is not in inference mode, and could not write tensors of that mode.
        with torch.inference_mode(False):
            try:
                memory = torch.empty(num_pieces, piece_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
            except RuntimeError as e:
                size = num_pieces * piece_bytes
                raise MemoryError(f"cannot allocate {size} bytes of page-locked host memory: {e}") from e
        self._pieces = [Piece(part, stream) for part in memory]
        self._next = 0

    def take(self) -> Piece:
        """Return the next piece, after a wait for the work that uses this piece."""
        piece = self._pieces[self._next]
        piece.wait()
        self._next = (self._next + 1) % self.num_pieces
        return piece

    def upload(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy ``source`` in host memory to ``target`` on the device. Both are contiguous, with one dimension and equal
        dtypes and lengths.

        When the method returns, ``source`` may be changed, and the last copies to the device may still be running.
        """
        to, of = target.view(torch.uint8), source.view(torch.uint8)
        if len(to) != len(of):
            raise ValueError(f"cannot copy {len(of)} bytes to {len(to)} bytes of device memory")
        for start in range(0, len(of), self.piece_bytes):
            piece, part = self.take(), of[start : start + self.piece_bytes]
            staged = piece.memory[: len(part)]
            staged.numpy()[:] = part.numpy()  # numpy uses only this thread, and other Python code may run.
            piece.launch(_copy(to[start : start + len(part)], staged))

    def settle(self) -> None:
        """Wait until no work uses the ring. Raises the error of the work."""
        for piece in self._pieces:
            piece.wait()


def _copy(target: torch.Tensor, source: torch.Tensor) -> Work:
    return lambda: target.copy_(source, non_blocking=True)
