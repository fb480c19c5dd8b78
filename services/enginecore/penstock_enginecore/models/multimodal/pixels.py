"""Pixels as towers take them: rescaled and normalized, as the checkpoint's processor would have done."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

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
