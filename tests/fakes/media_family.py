"""Media family whose features are the unchanged media, and that fails on demand."""

import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL.Image import Image

from penstock_common.types.media import EMBEDS, Modality, TensorData
from penstock_frontend.processing.media.families.base import FamilyProcessor, ProcessedItem, Replacement

RATE = 16_000


class PlainFamily:
    """Family in which every pixel row is an embedding row."""

    modalities: frozenset[Modality] = frozenset({"image", "audio", "video"})
    identity = b"plain"
    sampling_rate = RATE
    media_tokens: tuple[str, ...] = ("<media>",)

    def __init__(self, fault: str = "") -> None:
        """Create the family. ``fault`` is the error raised by the processor's creation; empty means none."""
        self._fault = fault

    def placeholder(self, modality: Modality) -> str:
        del modality
        return "<media>"

    def replacements(self, items: Sequence[ProcessedItem]) -> list[Replacement]:
        return [Replacement([1] * item.num_embeds) for item in items]

    def described(self, modality: Modality, data: Mapping[str, TensorData]) -> ProcessedItem:
        if set(data) != {EMBEDS}:
            raise ValueError(f"{sorted(data)[0]} is not known; this takes {EMBEDS}")
        return ProcessedItem(modality=modality, data=dict(data), num_embeds=data[EMBEDS].shape[0])

    def max_tokens(self, modality: Modality) -> int:
        del modality
        return 4096

    def make_processor(self) -> Callable[[], FamilyProcessor]:
        return partial(PlainProcessor, self._fault)


class PlainProcessor:
    """Arguments: ``fault`` (exit, kill, hang, spin, memory, wrong, raise), once where ``once`` names a file that is not
    there; ``torch`` tells whether it could be imported.
    """

    def __init__(self, fault: str) -> None:
        if fault:
            raise RuntimeError(fault)

    def image(self, image: Image, kwargs: Mapping[str, Any]) -> ProcessedItem:
        _fail(kwargs)
        if kwargs.get("torch"):
            return _item("image", loaded=np.array([_torch_is_there()], np.uint8))
        pixels = np.asarray(image).transpose(2, 0, 1)[None]
        return _item("image", pixel_values=np.ascontiguousarray(pixels))

    def audio(self, samples: npt.NDArray[np.float32], kwargs: Mapping[str, Any]) -> ProcessedItem:
        _fail(kwargs)
        return _item("audio", input_features=samples[None, None])

    def video(self, frames: Sequence[Image], timestamps: Sequence[float], kwargs: Mapping[str, Any]) -> ProcessedItem:
        _fail(kwargs)
        pixels = np.stack([np.asarray(frame) for frame in frames])
        return _item("video", pixel_values_videos=pixels, timestamps=np.array(timestamps, np.float32))


def _item(modality: Modality, **arrays: npt.NDArray[Any]) -> ProcessedItem:
    data = {name: TensorData(str(a.dtype), a.shape, a.tobytes()) for name, a in arrays.items()}  # type: ignore[arg-type]
    return ProcessedItem(modality=modality, data=data, num_embeds=next(iter(arrays.values())).shape[-2:][0])


def _torch_is_there() -> bool:
    try:
        import torch  # noqa: F401
    except ImportError:
        return sys.modules.get("torch") is not None
    return True


def _fail(kwargs: Mapping[str, Any]) -> None:
    fault = kwargs.get("fault", "")
    if once := kwargs.get("once"):
        try:
            os.close(os.open(once, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return
    if fault == "exit":
        os._exit(3)
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "hang":
        time.sleep(3600)
    if fault == "spin":
        while True:
            pass
    if fault == "memory":
        np.ones(1 << 40, np.uint8)
    if fault == "wrong":
        raise ValueError("processor_kwargs.fault is 'wrong'")
    if fault == "raise":
        raise KeyError("a secret of the medium")
