"""Whisper: one window of sound, which the encoder computes completely, including silence at the end."""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from penstock_common.types.media import Modality
from penstock_enginecore.models.multimodal.base import FLOATS, Spec
from penstock_enginecore.models.multimodal.families.base import Checkpoint, Family, Intake, Tensors
from penstock_enginecore.models.multimodal.processors import Normalization

_FEATURES = "input_features"


class _Window(Intake):
    """Sound as a mel spectrogram of one window."""

    modality: Modality = "audio"

    @property
    def specs(self) -> Mapping[str, Spec]:
        return {_FEATURES: Spec(FLOATS, self._shape)}

    @property
    def max_embeds(self) -> int:
        return int(self.config.max_source_positions)

    def count(self, tensors: Tensors) -> int:  # noqa: ARG002 - each window has the same number of embeddings
        return self.max_embeds

    def encode(self, tensors: Tensors) -> torch.Tensor:
        found: torch.Tensor = self.towers.encoder(tensors[_FEATURES].to(self.dtype)).last_hidden_state[0]
        return found

    def largest_tensors(self) -> Tensors:
        return {_FEATURES: torch.zeros(self._shape)}

    @property
    def _shape(self) -> tuple[int, int, int]:
        return 1, int(self.config.num_mel_bins), 2 * self.max_embeds

    def _normalization(self) -> Normalization | None:
        return None


def _arrange(layer: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Return the inputs of the first layer with contiguous hidden states. transformers transposes the output of the
    convolutions, and otherwise all layers would compute with transposed hidden states, which is slow.
    """
    del layer
    return inputs[0].contiguous(), *inputs[1:]


class Whisper(Family):
    """Encoder of a Whisper checkpoint."""

    intakes: ClassVar[tuple[type[Intake], ...]] = (_Window,)

    def __init__(self, towers: Any, checkpoint: Checkpoint) -> None:
        super().__init__(towers, checkpoint)
        towers.encoder.layers[0].register_forward_pre_hook(_arrange)

    @property
    def width(self) -> int:
        return int(self.config.d_model)

    def _num_used(self) -> int:
        return len(self._all_blocks)
