"""The halves of families that run in media workers, as far as they are the same. Nothing here may import torch."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL.Image import Image

from penstock_common.errors import ConfigError
from penstock_common.types.media import TensorData
from penstock_frontend.processing.media.families.tensors import from_arrays
from penstock_frontend.processing.media.item import ProcessedItem


class MediaProcessor:
    """A processor that takes nothing: those of families say what they take instead."""

    def image(self, image: Image, kwargs: Mapping[str, Any]) -> ProcessedItem:
        """Raise ValueError."""
        del image, kwargs
        raise ValueError("the model takes no images")

    def audio(self, samples: npt.NDArray[np.float32], kwargs: Mapping[str, Any]) -> ProcessedItem:
        """Raise ValueError."""
        del samples, kwargs
        raise ValueError("the model takes no sound")

    def video(self, frames: Sequence[Image], timestamps: Sequence[float], kwargs: Mapping[str, Any]) -> ProcessedItem:
        """Raise ValueError."""
        del frames, timestamps, kwargs
        raise ValueError("the model takes no video")


class PilImages:
    """The image processor of a checkpoint in transformers, on numpy and Pillow alone."""

    def __init__(self, folder: Path) -> None:
        """Raises ConfigError where transformers has none, or one for torchvision only."""
        from transformers import AutoImageProcessor  # half a second: in media workers alone

        load: Any = AutoImageProcessor.from_pretrained
        try:
            self._processor = load(str(folder), backend="pil", local_files_only=True)
        except Exception as e:  # an ImportError without a backend, an OSError without a file, what its class raises
            raise ConfigError(f"{folder}: its image processor cannot be made with numpy and Pillow alone: {e}") from e
        if self._processor.backend != "pil":
            name = type(self._processor).__name__
            raise ConfigError(
                f"{folder}: its image processor, {name}, exists for torchvision only, which is not served"
            )

    def __call__(self, images: Sequence[Image] | Sequence[Sequence[Image]], **kwargs: Any) -> dict[str, TensorData]:
        """What it gives for these images together, or for those of prompts, pixels as bytes: neither rescaled nor normalized."""
        given = self._processor(
            images=list(images),
            return_tensors="np",
            do_rescale=False,
            do_normalize=False,
            do_convert_rgb=False,
            **kwargs,
        )
        return from_arrays({name: np.asarray(value) for name, value in given.items()})
