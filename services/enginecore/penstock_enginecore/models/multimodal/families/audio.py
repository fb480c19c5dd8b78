"""Audio in windows of 30 seconds: Qwen2-Audio with one window per clip, Voxtral with any number of windows."""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from transformers.masking_utils import create_bidirectional_mask

from penstock_common.types.media import Modality
from penstock_enginecore.models.multimodal.base import FLOATS, MASKS, ItemError, Spec
from penstock_enginecore.models.multimodal.families.base import Family, Intake, Tensors
from penstock_enginecore.models.multimodal.processors import Normalization

_FEATURES, _MASK = "input_features", "feature_attention_mask"
_MAX_WINDOWS = 60


class _Audio(Intake):
    """Audio as a mel spectrogram."""

    modality: Modality = "audio"

    @property
    def num_bins(self) -> int:
        """Number of frequency bins of the spectrogram."""
        return int(self.config.audio_config.num_mel_bins)

    @property
    def window(self) -> int:
        """Number of time steps in a window of the spectrogram. The encoder's convolutions halve this number."""
        return 2 * int(self.config.audio_config.max_source_positions)

    def _normalization(self) -> Normalization | None:
        return None


class _MaskedWindow(_Audio):
    """One window, which may end with padding."""

    @property
    def specs(self) -> Mapping[str, Spec]:
        return {
            _FEATURES: Spec(FLOATS, (1, self.num_bins, self.window)),
            _MASK: Spec(MASKS, (1, self.window)),
        }

    @property
    def max_embeds(self) -> int:
        return self._lengths(self.window)[1]

    def count(self, tensors: Tensors) -> int:
        mask = tensors[_MASK][0].bool()
        length = int(mask.sum())
        if not bool(mask[:length].all()):
            raise ItemError(f"{_MASK} must be 1 from the first time step to the end of the sound, and 0 after the end")
        rows = self._lengths(length)[1]
        if rows < 1:
            raise ItemError(f"{_MASK} selects {length} time steps, which are too few for one embedding")
        return rows

    def encode(self, tensors: Tensors) -> torch.Tensor:
        """Encode an item, like the forward pass of transformers' model."""
        tower, features = self.towers.audio_tower, tensors[_FEATURES].to(self.dtype)
        length, rows = self._lengths(int(tensors[_MASK].bool().sum()))
        steps = (features.shape[-1] - 2) // 2 + 1
        heard = torch.arange(steps, device=features.device)[None] < length
        mask = create_bidirectional_mask(
            config=tower.config, inputs_embeds=features.new_zeros(1, steps, 1), attention_mask=heard.long()
        )
        states = tower(features, attention_mask=mask).last_hidden_state
        found: torch.Tensor = self.towers.multi_modal_projector(states)[0, :rows]
        return found

    def largest_tensors(self) -> Tensors:
        return {
            _FEATURES: torch.zeros(1, self.num_bins, self.window),
            _MASK: torch.ones(1, self.window, dtype=torch.int32),
        }

    def _lengths(self, length: int) -> tuple[int, int]:
        """Return two numbers: the hidden states between the encoder's convolutions and its pooling, and the embeddings
        after the pooling.
        """
        between, rows = self.towers.audio_tower._get_feat_extract_output_lengths(length)
        return int(between), int(rows)


class _Windows(_Audio):
    """Audio whose windows are encoded completely, including silence at the end of the last window."""

    @property
    def specs(self) -> Mapping[str, Spec]:
        return {_FEATURES: Spec(FLOATS, (None, self.num_bins, self.window))}

    @property
    def max_embeds(self) -> int:
        return self._max_windows * self._per_window

    def count(self, tensors: Tensors) -> int:
        return len(tensors[_FEATURES]) * self._per_window

    def encode(self, tensors: Tensors) -> torch.Tensor:
        rows: torch.Tensor = self.towers.get_audio_features(tensors[_FEATURES].to(self.dtype)).pooler_output
        return rows

    def largest_tensors(self) -> Tensors:
        return {_FEATURES: torch.zeros(self._max_windows, self.num_bins, self.window)}

    @property
    def _per_window(self) -> int:
        audio: Any = self.config.audio_config
        return int(audio.max_source_positions * audio.hidden_size // audio.intermediate_size)

    @property
    def _max_windows(self) -> int:
        return max(min(_MAX_WINDOWS, self.checkpoint.max_tokens // self._per_window), 1)


class Qwen2Audio(Family):
    """Qwen2-Audio."""

    intakes: ClassVar[tuple[type[Intake], ...]] = (_MaskedWindow,)


class Voxtral(Family):
    """Voxtral."""

    intakes: ClassVar[tuple[type[Intake], ...]] = (_Windows,)
