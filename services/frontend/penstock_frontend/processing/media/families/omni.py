"""Families of the thinkers of Qwen2.5-Omni and Qwen3-Omni, which accept images and sound.

https://huggingface.co/docs/transformers/model_doc/qwen2_5_omni, .../qwen3_omni_moe
"""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from penstock_common.types.media import EMBEDS, Modality, TensorData
from penstock_frontend.processing.media.families import base, tensors
from penstock_frontend.processing.media.families.base import FamilyProcessor, ProcessedItem
from penstock_frontend.processing.media.families.checkpoint import Checkpoint
from penstock_frontend.processing.media.families.qwen_vl import Grids, image_grids
from penstock_frontend.processing.media.families.single_images import ImageFamily, ImageProcessor

_FEATURES, _MASK = "input_features", "feature_attention_mask"
LONGEST = 1800
"""Maximum duration of a clip in seconds, for models whose processor in transformers has no limit."""
_ROWS_OF_CHUNK = 13
"""Number of embeddings of a complete chunk in Qwen3-Omni."""


class Clips(NamedTuple):
    """Format of audio clips of any length.

    Attributes:
        sampling_rate: Sampling rate in Hz.
        hop: Number of samples from one feature vector to the next.
        half_window: Half the number of samples that a feature vector depends on.
        bins: Number of elements of a feature vector.
        max_steps: Maximum number of feature vectors of a clip.
        chunk: Number of feature vectors of a chunk that the convolutions of Qwen3-Omni see at once, or 0 for
            Qwen2.5-Omni, whose embeddings do not depend on chunks.
    """

    sampling_rate: int
    hop: int
    half_window: int
    bins: int
    max_steps: int
    chunk: int

    @property
    def mask(self) -> str:
        """Name of the tensor that selects the steps of the clip."""
        return _MASK

    def rows(self, steps: int) -> int:
        """Return the number of embeddings of ``steps`` feature vectors."""
        if not self.chunk:
            return ((steps - 1) // 2 + 1 - 2) // 2 + 1
        halved = (steps % self.chunk - 1) // 2 + 1
        return ((halved - 1) // 2 + 1 - 1) // 2 + 1 + steps // self.chunk * _ROWS_OF_CHUNK

    @property
    def max_rows(self) -> int:
        """Maximum number of embeddings of a clip."""
        return self.rows(self.max_steps)

    @property
    def least_samples(self) -> int:
        """Minimum number of samples of a clip. This number of samples is enough for one embedding."""
        if self.chunk:  # the edges of a clip are mirrored
            return max(self.hop, self.half_window + 1)
        return 2 * self.hop + 1

    def check(self, num_samples: int) -> None:
        """Raise ValueError if a clip is too long, or if it is too short for one embedding."""
        least, most = self.least_samples, self.max_steps * self.hop
        if num_samples < least:
            raise ValueError(
                f"it has {num_samples / self.sampling_rate:.4f} s of sound ({num_samples} samples at {self.sampling_rate} Hz); "
                f"the model's minimum for a clip is {least / self.sampling_rate:.4f} s ({least} samples)"
            )
        if num_samples > most:
            raise ValueError(
                f"it has {num_samples / self.sampling_rate:.1f} s of sound; the model's maximum for a clip is "
                f"{most / self.sampling_rate:.0f} s"
            )

    def item(self, data: Mapping[str, TensorData]) -> ProcessedItem:
        """Return the media item for the tensors ``input_features`` ``[1, bins, steps]`` and ``feature_attention_mask``
        ``[1, steps]``.
        """
        steps = tensors.taken(data, _FEATURES, (1, self.bins, None)).shape[2]
        mask = tensors.to_array(tensors.taken(data, self.mask, (1, steps)))[0].astype(bool)
        length = int(mask.sum())
        if not mask[:length].all() or length > self.max_steps or self.rows(length) < 1:
            raise ValueError(
                f"{self.mask} selects {length} steps; the selected steps must be the first steps of the clip, enough for one "
                f"embedding, and at most {self.max_steps}"
            )
        return ProcessedItem(modality="audio", data=dict(data), num_embeds=self.rows(length))

    def described(self, data: Mapping[str, TensorData]) -> ProcessedItem:
        """Return the media item for tensors of a processor, or for the embeddings of a clip."""
        if EMBEDS not in data:
            tensors.check_names(data, (_FEATURES, self.mask))
            return self.item(data)
        rows = tensors.num_embeds(data, least=1, most=self.max_rows)
        return ProcessedItem(modality="audio", data=dict(data), num_embeds=rows)


def _clips(checkpoint: Checkpoint) -> Clips:
    """Return the format of clips from the configuration of the feature extractor. The defaults are those of its
    class.
    """
    settings = checkpoint.feature_extractor
    rate = checkpoint.number("sampling_rate", settings, default=16_000)
    hop = checkpoint.number("hop_length", settings, default=160)
    chunk, longest = 0, checkpoint.number("chunk_length", settings, default=300)
    if checkpoint.model_type == "qwen3_omni_moe":
        chunk = 2 * checkpoint.number("n_window", checkpoint.sub_config("audio_config"), default=50)
        longest = LONGEST
    return Clips(
        rate,
        hop,
        half_window=checkpoint.number("n_fft", settings, default=400) // 2,
        bins=checkpoint.number("feature_size", settings, default=80),
        max_steps=longest * rate // hop,
        chunk=chunk,
    )


class OmniProcessor(ImageProcessor):
    """Processor that calls the image processor and Whisper's feature extractor in transformers."""

    def __init__(self, folder: Path, images: Grids, clips: Clips) -> None:
        # only media workers import this module, because the import takes half a second
        from transformers import WhisperFeatureExtractor

        super().__init__(folder, images, None)
        load: Any = WhisperFeatureExtractor.from_pretrained
        self._extractor = load(str(folder), local_files_only=True)
        self._clips = clips

    def audio(self, samples: npt.NDArray[np.float32], kwargs: Mapping[str, Any]) -> ProcessedItem:
        """Process one audio clip. Raises ValueError if ``kwargs`` is not empty, because the processor accepts no
        arguments.
        """
        base.check_names(kwargs, ())
        clips = self._clips
        clips.check(len(samples))
        # transformers pads clips of Qwen2.5-Omni to the longest clip. The features of the clip itself depend only on
        # half a window of these zeros.
        enough = (-(-(len(samples) + 2 * clips.half_window) // clips.hop) + 1) * clips.hop
        padded = min(enough, clips.max_steps * clips.hop)
        padding: dict[str, Any] = {"padding": True} if clips.chunk else {"padding": "max_length", "max_length": padded}
        given = self._extractor(
            samples,
            sampling_rate=clips.sampling_rate,
            return_attention_mask=True,
            truncation=False,
            return_tensors="np",
            **padding,
        )
        mask = np.asarray(given["attention_mask"])
        steps = int(mask.sum())
        features = np.asarray(given[_FEATURES])[:, :, :steps]
        return clips.item(tensors.from_arrays({_FEATURES: features, _MASK: mask[:, :steps]}))


class QwenOmni(ImageFamily):
    """Family of the thinkers of Qwen2.5-Omni and Qwen3-Omni, whose prompts have one token for each embedding."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        is_newer = checkpoint.model_type == "qwen3_omni_moe"
        image, audio = ("<|image_pad|>", "<|audio_pad|>") if is_newer else ("<|IMAGE|>", "<|AUDIO|>")
        self._grids = image_grids(checkpoint, checkpoint.image_processor)
        self._clips = _clips(checkpoint)
        audio = checkpoint.token("audio_token", audio)
        super().__init__(checkpoint, checkpoint.token("image_token", image), self._grids, media_tokens=(audio,))
        self.modalities = frozenset({"image", "audio"})
        self.sampling_rate = self._clips.sampling_rate
        self._tokens["audio"] = audio
        self._token_ids["audio"] = checkpoint.token_id(audio)

    def described(self, modality: Modality, data: Mapping[str, TensorData]) -> ProcessedItem:
        """Return the media item for tensors of a processor, or for the embeddings of a clip."""
        if modality != "audio":
            return super().described(modality, data)
        return self._clips.described(data)

    def max_tokens(self, modality: Modality) -> int:
        """Return the number of tokens that the largest image or the longest clip has."""
        return self._clips.max_rows if modality == "audio" else super().max_tokens(modality)

    def make_processor(self) -> Callable[[], FamilyProcessor]:
        """Return a function that creates an ``OmniProcessor``."""
        return partial(OmniProcessor, self._folder, self._grids, self._clips)
