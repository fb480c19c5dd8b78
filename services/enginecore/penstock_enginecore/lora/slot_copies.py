"""Copies of adapters from host memory to slots of device memory, which run concurrently with steps."""

from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, Protocol

import torch

from penstock_enginecore.worker.device_thread import DeviceThread
from penstock_enginecore.worker.staging import CopyStream, GpuStream, StagingRing

NUM_PIECES = 8
PIECE_BYTES = 8 << 20
"""Size of a piece. ``NUM_PIECES`` pieces of page-locked host memory are allocated when the engine starts. Most adapters
are smaller than all pieces together, so their copies need not wait for the device before a step is launched.
"""

Pairs = Sequence[tuple[torch.Tensor, torch.Tensor]]
"""Targets on the device and sources in host memory. Both have one dimension, are contiguous, and have equal dtypes and
lengths.
"""


class Copies(Protocol):
    """Copies data to a device while the device computes."""

    def begin(self, pairs: Pairs) -> Any:
        """Start to copy sources to targets once all launched work is done, because earlier steps may read the targets.
        Does not block the host. The sources must not change until the copy has ended. Copies run in the order of calls.
        Returns a handle for ``await_end``.
        """

    def await_end(self, end: Any) -> None:
        """Make all work that is launched after this call wait for the copy. Raises the error of the copy."""

    def finish(self) -> None:
        """Wait until no copy runs any more, so that the memory of the targets can be freed."""


class AtOnce:
    """Copies on a CPU, synchronously."""

    def begin(self, pairs: Pairs) -> None:
        """Copy and return after the copy has ended."""
        for target, source in pairs:
            target.copy_(source)

    def await_end(self, end: None) -> None:
        """Do nothing, because the copy is already complete."""

    def finish(self) -> None:
        """Do nothing, because no copy is running."""


class StagedCopies:
    """Copies to a GPU from memory that is not page-locked, on a separate thread and stream.

    The thread copies the sources into pieces of a ring of page-locked memory, and the device copies each piece to the
    target. If all pieces are in use, the thread waits for the device.
    """

    def __init__(self, ring: StagingRing, stream: CopyStream) -> None:
        self._ring = ring
        self._stream = stream
        self._thread: DeviceThread | None = None

    @classmethod
    def on(cls, device: torch.device) -> "StagedCopies":
        """Return the copies to a GPU, with page-locked memory of ``NUM_PIECES`` times ``PIECE_BYTES`` bytes."""
        stream = GpuStream(device)
        return cls(StagingRing(NUM_PIECES, PIECE_BYTES, stream, device), stream)

    def begin(self, pairs: Pairs) -> "Future[Any]":
        """Start the copy on the thread, after all work on the calling thread's current stream."""
        if self._thread is None:
            self._thread = DeviceThread("lora copies")
        return self._thread.submit(partial(self._copy, self._stream.launched(), pairs))

    def await_end(self, end: "Future[Any]") -> None:
        """Block the host until the device has all copies in its queue. Then make the current stream wait for them."""
        self._stream.join(end.result())

    def finish(self) -> None:
        """Wait until all copies have ended, and end the thread. The next ``begin`` starts a new thread."""
        thread, self._thread = self._thread, None
        if thread is not None:
            try:
                thread.call(self._ring.settle)
            finally:
                thread.stop()

    @torch.inference_mode()  # The sources may be of this mode.
    def _copy(self, launched: Any, pairs: Pairs) -> Any:
        with self._stream.after(launched):
            for target, source in pairs:
                self._ring.upload(target, source)
            return self._stream.mark()
