"""Thinkers of Qwen2.5-Omni and Qwen3-Omni: images of any size as grids of patches, and sound of any length."""

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
from transformers.modeling_layers import GradientCheckpointingLayer

from penstock_common.types.media import Modality, MultiModalFeature
from penstock_enginecore.models.multimodal.base import FLOATS, MASKS, ItemError, Spec
from penstock_enginecore.models.multimodal.families.base import Intake, Tensors
from penstock_enginecore.models.multimodal.families.qwen_vl import Images, Qwen2VL
from penstock_enginecore.models.multimodal.processors import Normalization

_STEPS_PER_SECOND = 100
_LONGEST = 1800
"""Maximum duration of a clip in seconds, for models whose processor in transformers has no limit."""
_ROWS_OF_CHUNK = 13
"""Number of embeddings of a complete chunk in Qwen3-Omni."""


class _Sound(Intake):
    """Sound as a mel spectrogram of any length."""

    modality: Modality = "audio"
    features_name, mask_name = "input_features", "feature_attention_mask"

    @property
    def specs(self) -> Mapping[str, Spec]:
        return {
            self.features_name: Spec(FLOATS, (1, int(self.config.audio_config.num_mel_bins), None)),
            self.mask_name: Spec(MASKS, (1, None)),
        }

    @property
    def max_embeds(self) -> int:
        return self.rows(self._max_steps)

    def rows(self, steps: int) -> int:
        """Return the number of embeddings of a spectrogram with ``steps`` time steps."""
        return ((steps - 1) // 2 + 1 - 2) // 2 + 1

    def count(self, tensors: Tensors) -> int:
        steps, mask = tensors[self.features_name].shape[-1], tensors[self.mask_name][0].bool()
        length = int(mask.sum())
        if len(mask) != steps or not bool(mask[:length].all()):
            raise ItemError(
                f"{self.mask_name} has {len(mask)} time steps, of which {length} are 1; it must have the {steps} time steps of "
                f"{self.features_name}, and be 1 from the first time step to the end of the sound"
            )
        rows = self.rows(length)
        if not 1 <= rows <= self.max_embeds:
            raise ItemError(
                f"{self.mask_name} selects {length} time steps, which make {rows} of at most {self.max_embeds} embeddings"
            )
        return rows

    def encode(self, tensors: Tensors) -> torch.Tensor:
        return self._encoded(tensors)

    def _encoded(self, tensors: Tensors) -> torch.Tensor:
        """Return the embeddings that the model's audio encoder computes."""
        features = tensors[self.features_name].to(self.dtype)
        rows: torch.Tensor = self.towers.get_audio_features(features, tensors[self.mask_name].long()).pooler_output
        return rows

    def largest_tensors(self) -> Tensors:
        steps = self._max_steps
        return {
            self.features_name: torch.zeros(1, int(self.config.audio_config.num_mel_bins), steps),
            self.mask_name: torch.ones(1, steps, dtype=torch.int32),
        }

    @property
    def _max_steps(self) -> int:
        """Number of time steps of the longest sound that fits into a prompt."""
        lengths = range(self._longest * _STEPS_PER_SECOND + 1)
        return bisect_right(lengths, max(self.checkpoint.max_tokens, 1), key=self.rows) - 1

    @property
    def _longest(self) -> int:
        return int(self.checkpoint.settings.audio.get("chunk_length") or 300)

    def _normalization(self) -> Normalization | None:
        return None


class ChunkedSound(_Sound):
    """Sound whose convolutions see a chunk at a time, for a text model with separate embeddings for its first layers."""

    _longest = _LONGEST

    @property
    def chunk(self) -> int:
        """Number of time steps of a chunk."""
        return 2 * int(self.config.audio_config.n_window)

    def rows(self, steps: int) -> int:
        halved = (steps % self.chunk - 1) // 2 + 1
        return ((halved - 1) // 2 + 1 - 1) // 2 + 1 + steps // self.chunk * _ROWS_OF_CHUNK

    def encode(self, tensors: Tensors) -> torch.Tensor:
        """Return the embeddings, with zeros for the text model's first layers, which get embeddings of images only."""
        rows = self._encoded(tensors)
        deep = rows.shape[-1] * len(self.config.vision_config.deepstack_visual_indexes)
        return torch.nn.functional.pad(rows, (0, deep))


class Qwen25Omni(Qwen2VL):
    """Thinker of Qwen2.5-Omni. Positions of sound are those of text."""

    intakes: ClassVar[tuple[type[Intake], ...]] = (Images, _Sound)

    def blocks_of(self, modality: Modality) -> Sequence[torch.nn.Module]:
        """Return the layers of the encoder of this modality."""
        tower = self.towers.audio_tower if modality == "audio" else self.towers.visual
        return [module for module in tower.modules() if isinstance(module, GradientCheckpointingLayer)]

    def _grids(self, features: Sequence[MultiModalFeature]) -> Iterator[tuple[int, int, Any]]:
        return super()._grids([feature for feature in features if feature.modality != "audio"])


class Qwen3Omni(Qwen25Omni):
    """Thinker of Qwen3-Omni. The text model's first layers get separate embeddings of images (deepstack)."""

    intakes: ClassVar[tuple[type[Intake], ...]] = (Images, ChunkedSound)

    def __init__(self, towers: Any, checkpoint: Any) -> None:
        super().__init__(towers, checkpoint)
        self.num_deepstack = len(self.config.vision_config.deepstack_visual_indexes)
