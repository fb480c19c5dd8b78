"""Qwen3-ASR: sound of any length, padded to complete chunks."""

from typing import ClassVar

import torch

from penstock_enginecore.models.multimodal.base import ItemError
from penstock_enginecore.models.multimodal.families.base import Family, Intake, Tensors
from penstock_enginecore.models.multimodal.families.omni import ChunkedSound


class _Sound(ChunkedSound):
    """Sound as a mel spectrogram of complete chunks."""

    mask_name = "input_features_mask"

    def count(self, tensors: Tensors) -> int:
        steps = tensors[self.features_name].shape[-1]
        if steps % self.chunk:
            raise ItemError(f"{self.features_name} has {steps} time steps; it must have a multiple of {self.chunk}")
        return super().count(tensors)

    def encode(self, tensors: Tensors) -> torch.Tensor:
        return self._encoded(tensors)

    def largest_tensors(self) -> Tensors:
        """Return the tensors of the longest sound, with padding behind it."""
        return {
            name: torch.nn.functional.pad(tensor, (0, -tensor.shape[-1] % self.chunk))
            for name, tensor in super().largest_tensors().items()
        }


class Qwen3ASR(Family):
    """Qwen3-ASR."""

    intakes: ClassVar[tuple[type[Intake], ...]] = (_Sound,)
