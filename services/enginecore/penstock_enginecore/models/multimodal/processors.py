"""Settings of a checkpoint's media processors, and the normalization of pixels that they specify."""

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
    """Normalization of pixels. ``table`` is float32 ``[channels, 256]``, the normalized value of each pixel value."""

    table: torch.Tensor

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> "Normalization":
        """Return the normalization that a processor's settings specify, with the same rounding as transformers' PIL
        processors.

        The PIL processors multiply in float64, round to float32, subtract the mean and divide by the standard
        deviation.
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
        """Return a copy of the normalization whose table is on ``device``."""
        return Normalization(self.table.to(device))

    def apply(self, pixels: torch.Tensor, channels: int) -> torch.Tensor:
        """Return normalized pixels, float32, in the same shape. ``channels`` is the index of the dimension with the
        colours. Floating-point pixels are only converted to float32, because they are already normalized.
        """
        if pixels.dtype != torch.uint8:
            return pixels.float()
        if (count := pixels.shape[channels]) != len(self.table):
            raise ValueError(f"pixels have {count} colours; the checkpoint's processor normalizes {len(self.table)}")
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
    """Settings of a checkpoint's processors. ``processor`` has the common settings. The other fields are empty if the
    checkpoint has no such settings.
    """

    directory: Path
    processor: Mapping[str, Any]
    image: Mapping[str, Any]
    video: Mapping[str, Any]
    audio: Mapping[str, Any]

    @classmethod
    def read(cls, directory: Path) -> "ProcessorSettings":
        """Read the settings from the files in ``directory``. As in transformers, ``processor_config.json`` takes
        precedence over the other files.
        """
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
        """Return the normalization of pixels that ``settings`` of images or video specify. Raises ModelLoadError if the
        settings are not supported.
        """
        known: dict[str, Any] = {"do_rescale": True, "rescale_factor": 1 / 255, "do_normalize": True}
        known |= {key: settings[key] for key in _KEYS if settings.get(key) is not None}
        for key in ("image_mean", "image_std"):
            if key not in known:
                known[key] = self._default(key)
        return Normalization.of(known)

    def _default(self, key: str) -> Any:
        """Return the default value of a setting in the checkpoint's image processor class. Needs Pillow."""
        from transformers import AutoImageProcessor

        make: Any = AutoImageProcessor
        try:
            return getattr(make.from_pretrained(self.directory, backend="pil"), key)
        except (OSError, ValueError, ImportError, AttributeError) as e:
            raise ModelLoadError(
                f"{self.directory / _CONFIG} does not set {key}, and its default cannot be determined: {e}"
            ) from e


def _read(file: Path) -> Mapping[str, Any]:
    """Return the settings in ``file``, or no settings if the file does not exist. Raises ModelLoadError if the file
    cannot be read or is not a JSON object.
    """
    try:
        found = read_json(file)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as e:
        raise ModelLoadError(f"{file} cannot be read: {e}") from e
    if not isinstance(found, dict):
        raise ModelLoadError(f"{file} is not a JSON object with settings")
    return found
