"""Family of Qwen3-ASR, which accepts sound.

https://huggingface.co/docs/transformers/model_doc/qwen3_asr
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock_common.types.media import Modality, TensorData
from penstock_frontend.processing.media.families import base, tensors
from penstock_frontend.processing.media.families.base import FamilyProcessor, ProcessedItem, Replacement
from penstock_frontend.processing.media.families.checkpoint import Checkpoint
from penstock_frontend.processing.media.families.omni import LONGEST, Clips
from penstock_frontend.processing.media.families.tensors import MediaProcessor

_FEATURES, _MASK = "input_features", "input_features_mask"


class _PaddedClips(Clips):
    """Format of audio clips that are padded to complete chunks."""

    @property
    def mask(self) -> str:
        return _MASK

    @property
    def least_samples(self) -> int:
        return 1

    def item(self, data: Mapping[str, TensorData]) -> ProcessedItem:
        item = super().item(data)
        if (steps := data[_FEATURES].shape[2]) % self.chunk:
            raise ValueError(f"{_FEATURES} has {steps} steps; the number of steps must be a multiple of {self.chunk}")
        return item


class _Processor(MediaProcessor):
    """Processor that calls Whisper's feature extractor in transformers, which runs with numpy and without torch.
    Qwen3-ASR's own extractor computes the same features, but only with torch.
    """

    def __init__(self, folder: Path, clips: _PaddedClips, min_length: int) -> None:
        # only media workers import this module, because the import takes half a second
        from transformers import WhisperFeatureExtractor

        load: Any = WhisperFeatureExtractor.from_pretrained
        self._extractor = load(str(folder), local_files_only=True)
        self._clips = clips
        self._min_length = min_length

    def audio(self, samples: npt.NDArray[np.float32], kwargs: Mapping[str, Any]) -> ProcessedItem:
        """Process one audio clip. Raises ValueError if ``kwargs`` is not empty, because the processor accepts no
        arguments.
        """
        base.check_names(kwargs, ())
        self._clips.check(len(samples))
        given = self._extractor(
            np.pad(samples, (0, max(self._min_length - len(samples), 0))),
            sampling_rate=self._clips.sampling_rate,
            return_attention_mask=True,
            padding=True,
            truncation=False,
            return_tensors="np",
        )
        features, mask = np.asarray(given[_FEATURES]), np.asarray(given["attention_mask"])
        missing = -features.shape[2] % self._clips.chunk
        padded = {
            _FEATURES: np.pad(features, [(0, 0), (0, 0), (0, missing)]),
            _MASK: np.pad(mask, [(0, 0), (0, missing)]),
        }
        return self._clips.item(tensors.from_arrays(padded))


class Qwen3ASR:
    """Family of Qwen3-ASR, whose prompts have one token for each embedding."""

    modalities: frozenset[Modality] = frozenset({"audio"})

    def __init__(self, checkpoint: Checkpoint) -> None:
        settings = checkpoint.feature_extractor
        rate = checkpoint.number("sampling_rate", settings, default=16_000)
        hop = checkpoint.number("hop_length", settings, default=160)
        self._clips = _PaddedClips(
            rate,
            hop,
            half_window=checkpoint.number("n_fft", settings, default=400) // 2,
            bins=checkpoint.number("feature_size", settings, default=128),
            max_steps=LONGEST * rate // hop,
            chunk=2 * checkpoint.number("n_window", checkpoint.sub_config("audio_config"), default=50),
        )
        self._min_length = checkpoint.number("min_length", settings, default=8000)
        self._folder = checkpoint.folder
        self._token = checkpoint.token("audio_token", "<|audio_pad|>")
        self._token_id = checkpoint.token_id(self._token)
        self.identity = checkpoint.identity
        self.sampling_rate = rate
        self.media_tokens = (self._token,)

    def placeholder(self, modality: Modality) -> str:
        """Return the text of the token that stands for one embedding."""
        del modality
        return self._token

    def replacements(self, items: Sequence[ProcessedItem]) -> list[Replacement]:
        """Return, for each item, one token id for each embedding of the item."""
        return [Replacement([self._token_id] * item.num_embeds) for item in items]

    def described(self, modality: Modality, data: Mapping[str, TensorData]) -> ProcessedItem:
        """Return the media item for tensors of the processor, or for embeddings."""
        del modality
        return self._clips.described(data)

    def max_tokens(self, modality: Modality) -> int:
        """Return the number of tokens that the longest audio clip has."""
        del modality
        return self._clips.max_rows

    def make_processor(self) -> Callable[[], FamilyProcessor]:
        """Return a function that creates the processor."""
        return partial(_Processor, self._folder, self._clips, self._min_length)
