"""A media worker as the frontend sees it: its process, and the socket between them."""

import asyncio
import contextlib
import math
import os
import socket
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from penstock_common.child_process import start_python
from penstock_common.types.media import DTYPE_BYTES, Modality, TensorData
from penstock_frontend.processing.media.item import ProcessedItem
from penstock_frontend.processing.media.worker_messages import (
    LENGTH,
    Answer,
    JobHead,
    Processed,
    Refused,
    Setup,
    TensorHead,
    decode_answer,
    decode_ready,
    framed,
)

_MODULE = "penstock_frontend.processing.media.worker"
_LONGEST_HEAD = 1024 * 1024
_MOST_EMBEDS = 1024 * 1024
"""Of one item: no model reads as many tokens."""
_ENVIRONMENT = (
    "HF_HOME",
    "HF_HUB_CACHE",
    "HOME",
    "LANG",
    "LC_ALL",
    "LD_LIBRARY_PATH",
    "PATH",
    "TMPDIR",
    "XDG_CACHE_HOME",
)
"""What a worker gets of the frontend's environment: no keys, no addresses."""
_OF_WORKERS = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
}


class Job(NamedTuple):
    """An item to decode and process: a file, or those of a video's frames with when they are seen, in seconds."""

    modality: Modality
    files: Sequence[bytes]
    timestamps: Sequence[float]
    arguments: bytes
    """Of the processor: a JSON object."""


class WorkerLost(Exception):  # noqa: N818 - it says what happened
    """The process is gone, or says what no worker says."""


class NoWorker(Exception):  # noqa: N818 - it says what happened
    """A worker cannot make its processor. The text says why."""


class WorkerProcess:
    """One process. What it says is not trusted further than it can be checked: it has opened files of clients."""

    def __init__(self, most_bytes: int) -> None:
        """Starts it. ``most_bytes``: of an item's tensors."""
        self._channel, theirs = socket.socketpair()
        self._channel.setblocking(False)
        self._most_bytes = most_bytes
        environ = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
        with theirs:
            self._process = start_python(
                _MODULE, [str(theirs.fileno())], [theirs.fileno()], environ={**environ, **_OF_WORKERS}
            )

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return self._process.poll() is None

    async def set_up(self, setup: Setup) -> None:
        """Wait until it has its processor. Raises NoWorker, WorkerLost."""
        with self._lost_if_broken():
            await asyncio.get_running_loop().sock_sendall(self._channel, framed(setup))
            ready = decode_ready(await self._head())
        if ready.error:
            raise NoWorker(ready.error)

    async def process(self, job: Job) -> tuple[ProcessedItem, float] | Refused:
        """What comes of an item, and the seconds it took. Raises WorkerLost."""
        loop = asyncio.get_running_loop()
        head = JobHead(
            modality=job.modality,
            sizes=tuple(map(len, job.files)),
            timestamps=tuple(job.timestamps),
            arguments=job.arguments,
        )
        with self._lost_if_broken():
            await loop.sock_sendall(self._channel, framed(head))
            for file in job.files:
                await loop.sock_sendall(self._channel, file)
            answer: Answer = decode_answer(await self._head())
            if isinstance(answer, Refused):
                return answer
            return await self._item(answer, job.modality), answer.seconds

    async def ended(self) -> None:
        """Wait until it has ended, or says something though it has no item. Can be cancelled."""
        with contextlib.suppress(OSError):
            await asyncio.get_running_loop().sock_recv(self._channel, 1)

    async def end(self) -> int:
        """Kill it. Returns its exit code, negative for a signal."""
        self._process.kill()
        self._channel.close()
        return await asyncio.to_thread(self._process.wait)

    @contextlib.contextmanager
    def _lost_if_broken(self) -> Any:
        try:
            yield
        except (OSError, EOFError, msgspec.MsgspecError) as e:
            raise WorkerLost(type(e).__name__) from e

    async def _item(self, head: Processed, modality: Modality) -> ProcessedItem:
        sizes = [math.prod(tensor.shape) * DTYPE_BYTES[tensor.dtype] for tensor in head.tensors]
        if (
            head.modality != modality
            or not 0 <= head.num_embeds <= _MOST_EMBEDS
            or any(length < 0 for tensor in head.tensors for length in tensor.shape)
            or sizes != [tensor.size for tensor in head.tensors]
            or sum(sizes) > self._most_bytes
        ):
            raise EOFError
        data = {tensor.name: await self._tensor(tensor) for tensor in head.tensors}
        return ProcessedItem(modality=modality, data=data, num_embeds=head.num_embeds, layout=head.layout)

    async def _tensor(self, head: TensorHead) -> TensorData:
        return TensorData(head.dtype, head.shape, await self._take(head.size))

    async def _head(self) -> bytearray:
        (length,) = LENGTH.unpack(await self._take(LENGTH.size))
        if length > _LONGEST_HEAD:
            raise EOFError
        return await self._take(length)

    async def _take(self, size: int) -> bytearray:
        """Read to where it stays: what comes of an item is not copied again."""
        taken = bytearray(size)
        view, loop = memoryview(taken), asyncio.get_running_loop()
        while len(view):
            if not (count := await loop.sock_recv_into(self._channel, view)):
                raise EOFError
            view = view[count:]
        return taken
