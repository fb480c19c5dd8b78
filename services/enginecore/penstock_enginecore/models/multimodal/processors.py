"""What a checkpoint's files say of its processors, and pixels as its processor would have made them."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from penstock_common.files import read_json
from penstock_enginecore.models.errors import ModelLoadError

_LEVELS = 256


@dataclass(frozen=True, slots=True)
class Normalization:
    """What a processor makes of pixels. ``table`` float32 ``[channels, 256]``: of each value of a pixel."""

    table: torch.Tensor

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> "Normalization":
        """By a processor's settings. In the steps of transformers' PIL processors: a product in float64, rounded to float32, from
        which the mean is taken, and which is divided by the deviation.
        """
        mean, std = _per_channel(settings["image_mean"]), _per_channel(settings["image_std"])
        levels = np.arange(_LEVELS)
        values = levels.astype(np.float32)
        if settings["do_rescale"]:
            values = (levels.astype(np.float64) * settings["rescale_factor"]).astype(np.float32)
        table = np.broadcast_to(values, (max(len(mean), len(std)), _LEVELS))
        if settings["do_normalize"]:
            table = (table - mean[:, None]) / std[:, None]
        return cls(torch.from_numpy(np.array(table)))

    def to(self, device: torch.device) -> "Normalization":
        """The same on ``device``."""
        return Normalization(self.table.to(device))

    def apply(self, pixels: torch.Tensor, channels: int) -> torch.Tensor:
        """float32 in the shape of ``pixels``, whose dimension ``channels`` is that of the colours. Those that are floats already
        are taken as normalized.
        """
        if pixels.dtype != torch.uint8:
            return pixels.float()
        if (count := pixels.shape[channels]) != len(self.table):
            raise ValueError(f"pixels have {count} colours; the checkpoint's processor knows {len(self.table)}")
        row = torch.arange(0, count * _LEVELS, _LEVELS, dtype=torch.int32, device=pixels.device)
        places = pixels + row.view(-1, *[1] * (pixels.dim() - channels - 1))
        return self.table.flatten().index_select(0, places.flatten()).view(pixels.shape)


def _per_channel(value: float | list[float]) -> npt.NDArray[np.float32]:
    return np.asarray(value if isinstance(value, list | tuple) else [value] * 3, dtype=np.float32)


_CONFIG, _PROCESSOR_CONFIG = "preprocessor_config.json", "processor_config.json"
_VIDEO_CONFIG = "video_preprocessor_config.json"
_KEYS = ("do_rescale", "rescale_factor", "do_normalize", "image_mean", "image_std")


@dataclass(frozen=True, slots=True)
class ProcessorSettings:
    """``processor``: of the whole; the others of its parts, ``{}`` where there is none."""

    directory: Path
    processor: Mapping[str, Any]
    image: Mapping[str, Any]
    video: Mapping[str, Any]
    audio: Mapping[str, Any]

    @classmethod
    def read(cls, directory: Path) -> "ProcessorSettings":
        """Of the files in ``directory``; what is in ``processor_config.json`` goes first, as transformers has it."""
        processor = _read(directory / _PROCESSOR_CONFIG)
        main = _read(directory / _CONFIG)
        return cls(
            directory=directory,
            processor=processor,
            image=processor.get("image_processor") or main,
            video=processor.get("video_processor") or _read(directory / _VIDEO_CONFIG) or main,
            audio=processor.get("feature_extractor") or main,
        )

    def normalization(self, settings: Mapping[str, Any]) -> Normalization:
        """Of pixels by ``settings``, which are those of images or video. Raises ModelLoadError."""
        known: dict[str, Any] = {"do_rescale": True, "rescale_factor": 1 / 255, "do_normalize": True}
        known |= {key: settings[key] for key in _KEYS if settings.get(key) is not None}
        for key in ("image_mean", "image_std"):
            if key not in known:
                known[key] = self._default(key)
        return Normalization.of(known)

    def _default(self, key: str) -> Any:
        """What the class of the checkpoint's image processor has, where its files do not say. It needs Pillow."""
        from transformers import AutoImageProcessor

        make: Any = AutoImageProcessor
        try:
            return getattr(make.from_pretrained(self.directory, backend="pil"), key)
        except (OSError, ValueError, ImportError, AttributeError) as e:
            raise ModelLoadError(
                f"{self.directory / _CONFIG} does not name {key}, and its default is not known: {e}"
            ) from e


def _read(file: Path) -> Mapping[str, Any]:
    """The settings in ``file``; none if it is not there. Raises ModelLoadError."""
    try:
        found = read_json(file)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as e:
        raise ModelLoadError(f"{file} cannot be read: {e}") from e
    if not isinstance(found, dict):
        raise ModelLoadError(f"{file} holds no settings")
    return found
