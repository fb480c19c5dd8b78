"""Entry point of a media worker process: ``python -m penstock_frontend.processing.media.worker SOCKET``.

Only this process opens media files from clients. The process blocks imports of torch, so that transformers uses numpy
and Pillow.
"""

import contextlib
import math
import os
import pickle
import resource
import socket
import sys
import time
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from penstock_common.process import end_with_parent, limit_memory, limit_resource, name_process
from penstock_frontend.processing.media import windows
from penstock_frontend.processing.media.decode import VideoFrames, decode_image, decode_sound, open_image
from penstock_frontend.processing.media.families.base import FamilyProcessor, ProcessedItem
from penstock_frontend.processing.media.worker_messages import (
    LENGTH,
    JobHead,
    Processed,
    Ready,
    Refused,
    Setup,
    TensorHead,
    TooLarge,
    Unreadable,
    decode_job,
    decode_setup,
    framed,
)

_BLOCKED = ("torch", "torchvision", "torchaudio", "torchcodec", "tensorflow", "jax")
_NICENESS = 10
_LONGEST_REASON = 300
"""Maximum number of characters of a processor's error message about its arguments."""


class MediaWorker:
    """Processes the media items that arrive on its socket one after the other, until the frontend closes the socket."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel

    def run(self) -> None:
        """Run the worker until the frontend closes the socket. Raises EOFError when the frontend has closed the socket."""
        setup = decode_setup(self._head())
        try:
            make_processor = pickle.loads(setup.make_processor)  # noqa: S301 - the data come from the frontend
            processor: FamilyProcessor = make_processor()
        except Exception as e:
            traceback.print_exc()
            self._channel.sendall(framed(Ready(error=f"{type(e).__name__}: {e}")))
            return
        _say_nothing()
        limit_memory(setup.memory)
        self._channel.sendall(framed(Ready()))
        while True:
            job = decode_job(self._head())
            files = [self._take(size) for size in job.sizes]
            _limit_seconds(setup.speech_seconds if job.kind == "split" else setup.seconds)
            if not self._answer(processor, setup, job, files):
                return

    def _answer(self, processor: FamilyProcessor, setup: Setup, job: JobHead, files: Sequence[bytes]) -> bool:
        """Process a media item, and send the answer. Return whether the worker can process further items."""
        started = time.perf_counter()
        try:
            item = _process(processor, setup, job, files)
        except TooLarge as e:
            return self._refuse(Refused(kind="too_large", what=e.what, setting=e.setting, limit=e.limit))
        except Unreadable as e:
            return self._refuse(Refused(kind="unreadable", what=str(e)))
        except MemoryError:
            what = "needs more memory than a media worker may use"
            limit = setup.memory
            return self._refuse(
                Refused(kind="too_large", what=what, setting="media.worker_memory", limit=limit, ends=True)
            )
        except ValueError as e:  # the processor does not accept the arguments of the request
            return self._refuse(Refused(kind="unreadable", what=f"cannot be processed: {e}"[:_LONGEST_REASON]))
        except Exception as e:
            return self._refuse(Refused(kind="unreadable", what="cannot be processed", unexpected=_where(e)))
        tensors = tuple(TensorHead(name, t.dtype, t.shape, len(t.data)) for name, t in item.data.items())
        head = Processed(
            modality=item.modality,
            tensors=tensors,
            num_embeds=item.num_embeds,
            layout=item.layout,
            seconds=time.perf_counter() - started,
        )
        self._channel.sendall(framed(head))
        for tensor in item.data.values():
            self._channel.sendall(tensor.data)
        return True

    def _refuse(self, refused: Refused) -> bool:
        self._channel.sendall(framed(refused))
        return not refused.ends

    def _head(self) -> bytes:
        (length,) = LENGTH.unpack(self._take(LENGTH.size))
        return self._take(length)

    def _take(self, size: int) -> bytes:
        taken = bytearray(size)
        view = memoryview(taken)
        while len(view):
            if not (count := self._channel.recv_into(view)):
                raise EOFError
            view = view[count:]
        return bytes(taken)


def _process(processor: FamilyProcessor, setup: Setup, job: JobHead, files: Sequence[bytes]) -> ProcessedItem:
    arguments = msgspec.json.decode(job.arguments, type=dict[str, Any])
    if job.kind == "split":
        return windows.split(_decode_speech(files[0], setup), setup.sampling_rate)
    if job.modality == "audio":
        return processor.audio(decode_sound(files[0], setup.sampling_rate, setup.limits), arguments)
    if job.modality == "video":
        return processor.video(VideoFrames(files, setup.limits), job.timestamps, arguments)
    with open_image(files[0], setup.limits) as image:
        return processor.image(decode_image(image), arguments)


def _decode_speech(file: bytes, setup: Setup) -> npt.NDArray[np.float32]:
    """Decode an audio file with speech, whose length has another limit than that of an audio item in a prompt."""
    most = setup.max_speech_seconds
    try:
        limits = msgspec.structs.replace(setup.limits, max_audio_seconds=most)
        return decode_sound(file, setup.sampling_rate, limits)
    except TooLarge as e:
        raise TooLarge(e.what, "media.max_speech_seconds", most) from None


def _where(error: Exception) -> str:
    """Return the type, the file and the line of an error. The message is left out, because it may quote the media."""
    frames = traceback.extract_tb(error.__traceback__)
    places = [f"{Path(frame.filename).name}:{frame.lineno}" for frame in frames[-3:]]
    return f"{type(error).__name__} at {' > '.join(places)}"


def _say_nothing() -> None:
    """Discard everything that the process prints. Decoders in C print warnings about files, so clients could fill the
    logs.
    """
    with Path(os.devnull).open("wb") as nowhere:
        for descriptor in (1, 2):
            os.dup2(nowhere.fileno(), descriptor)


def _limit_seconds(seconds: float) -> None:
    """Limit the CPU time of the process from now on.

    The frontend also limits the time of each item. The limit here is for cases in which the frontend cannot do so.
    """
    usage = resource.getrusage(resource.RUSAGE_SELF)
    limit_resource(resource.RLIMIT_CPU, math.ceil(usage.ru_utime + usage.ru_stime + seconds) + 1)


def main(argv: Sequence[str]) -> None:
    """Run the media worker process. ``argv`` contains the number of the socket's file descriptor."""
    end_with_parent()
    for module in _BLOCKED:
        sys.modules[module] = None  # type: ignore[assignment]  # None makes the import of the module fail
    warnings.filterwarnings("ignore", module="PIL")  # Pillow would warn about unusual files of clients
    name_process("media-worker")
    os.nice(_NICENESS)
    # The socket is also closed if the frontend was killed, or if the frontend has replaced this worker.
    with socket.socket(fileno=int(argv[0])) as channel, contextlib.suppress(EOFError, ConnectionError):
        MediaWorker(channel).run()


if __name__ == "__main__":
    main(sys.argv[1:])
