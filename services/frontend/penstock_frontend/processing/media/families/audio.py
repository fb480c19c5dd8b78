"""Families of models with audio. Qwen2-Audio has one window of samples per clip, and Voxtral has several windows per
clip.

https://huggingface.co/docs/transformers/model_doc/qwen2_audio,
https://huggingface.co/docs/transformers/model_doc/voxtral
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from penstock_common.errors import ConfigError
from penstock_common.types.media import EMBEDS, Modality, TensorData
from penstock_frontend.processing.media.families import base, tensors
from penstock_frontend.processing.media.families.base import FamilyProcessor, ProcessedItem, Replacement
from penstock_frontend.processing.media.families.checkpoint import Checkpoint
from penstock_frontend.processing.media.families.tensors import MediaProcessor

FEATURES, _MASK = "input_features", "feature_attention_mask"
_MAX_WINDOWS = 60
"""Maximum number of windows per clip, whatever the length of the prompt. The windows are half an hour long together.
The processor in transformers has no limit.
"""
_POSITIONS = 131_072
"""Maximum number of positions of Voxtral's text model, if the configuration has no value."""


class Windows(NamedTuple):
    """Format of the windows into which an audio clip is divided.

    A window has ``samples`` audio samples. The features of a window are ``steps`` vectors with ``bins`` numbers each.

    Attributes:
        sampling_rate: Sampling rate in Hz.
        samples: Number of samples per window.
        steps: Number of feature vectors per window.
        bins: Number of elements of a feature vector.
        rows_of_window: Number of embeddings per window. 0 if this number depends on the attention mask.
        max_windows: Maximum number of windows per clip.
    """

    sampling_rate: int
    samples: int
    steps: int
    bins: int
    rows_of_window: int = 0
    max_windows: int = 1

    @property
    def max_rows(self) -> int:
        """Maximum number of embeddings of an audio clip."""
        return self.rows_of_window * self.max_windows or _masked_rows(self.steps)

    def item(self, data: Mapping[str, TensorData]) -> ProcessedItem:
        """Return the media item for the tensor ``input_features`` ``[windows, bins, steps]`` and an optional tensor
        ``feature_attention_mask`` ``[1, steps]``.
        """
        count = tensors.taken(data, FEATURES, (None, self.bins, self.steps)).shape[0]
        if not 1 <= count <= self.max_windows:
            raise ValueError(f"{FEATURES} has {count} windows; an audio clip may have from 1 to {self.max_windows}")
        rows = count * self.rows_of_window if self.rows_of_window else self._rows(data)
        return ProcessedItem(modality="audio", data=dict(data), num_embeds=rows)

    def _rows(self, data: Mapping[str, TensorData]) -> int:
        mask = tensors.to_array(tensors.taken(data, _MASK, (1, self.steps)))[0].astype(bool)
        length = int(mask.sum())
        if not mask[:length].all() or (rows := _masked_rows(length)) < 1:
            raise ValueError(
                f"{_MASK} selects {length} steps; the selected steps must be the first steps of the clip, and enough "
                "for one embedding"
            )
        return rows

    @property
    def least_samples(self) -> int:
        """Minimum number of samples of an audio clip. This number of samples is enough for one embedding."""
        if self.rows_of_window:
            return 1
        steps = next(length for length in range(1, self.steps + 1) if _masked_rows(length) > 0)
        return (steps - 1) * (self.samples // self.steps) + 1

    def check(self, num_samples: int) -> None:
        """Raise ValueError if an audio clip is too long, or if it is too short for one embedding."""
        most, least = self.samples * self.max_windows, self.least_samples
        if num_samples < least:
            raise ValueError(
                f"the clip has {num_samples / self.sampling_rate:.4f} s of sound ({num_samples} samples at "
                f"{self.sampling_rate} Hz); "
                f"the model's minimum for a clip is {least / self.sampling_rate:.4f} s ({least} samples)"
            )
        if num_samples > most:
            raise ValueError(
                f"the clip has {num_samples / self.sampling_rate:.1f} s of sound; the model's maximum for a clip is "
                f"{most / self.sampling_rate:.0f} s"
            )


class Audio:
    """Family of audio models whose prompts have one token for each embedding. ``names`` are the names of the input
    tensors.
    """

    modalities: frozenset[Modality] = frozenset({"audio"})

    def __init__(self, checkpoint: Checkpoint, token: str, windows: Windows, names: tuple[str, ...]) -> None:
        self.identity = checkpoint.identity
        self.sampling_rate = windows.sampling_rate
        self.media_tokens = (token,)
        self._token, self._token_id = token, checkpoint.token_id(token)
        self._folder = checkpoint.folder
        self._windows = windows
        self._names = names

    def placeholder(self, modality: Modality) -> str:
        """Return the text of the token that stands for one embedding."""
        del modality
        return self._token

    def replacements(self, items: Sequence[ProcessedItem]) -> list[Replacement]:
        """Return, for each item, the token ids that replace the item's placeholder in the prompt: one token id for each
        embedding of the item.
        """
        return [Replacement([self._token_id] * item.num_embeds) for item in items]

    def described(self, modality: Modality, data: Mapping[str, TensorData]) -> ProcessedItem:
        """Return the media item for tensors of the processor, or for embeddings.

        A clip has a maximum number of embeddings.
        """
        del modality
        if EMBEDS not in data:
            tensors.check_names(data, self._names)
            return self._windows.item(data)
        rows = tensors.num_embeds(data, least=1, most=self._windows.max_rows)
        return ProcessedItem(modality="audio", data=dict(data), num_embeds=rows)

    def max_tokens(self, modality: Modality) -> int:
        """Return the number of tokens that the longest audio clip has."""
        del modality
        return self._windows.max_rows

    def make_processor(self) -> Callable[[], FamilyProcessor]:
        """Return a function that creates an ``AudioProcessor``."""
        return partial(AudioProcessor, self._folder, self._windows)


class Qwen2Audio(Audio):
    """Family of Qwen2-Audio, with at most one window per audio clip."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        token = checkpoint.token("audio_token", "<|AUDIO|>")
        super().__init__(checkpoint, token, windows_of(checkpoint), (FEATURES, _MASK))


class Voxtral(Audio):
    """Family of Voxtral, which pads the last window of an audio clip with silence.

    A clip may have as many windows as have room in a prompt.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        tower = checkpoint.sub_config("audio_config")
        positions, hidden, merged = (
            checkpoint.number(name, tower) for name in ("max_source_positions", "hidden_size", "intermediate_size")
        )
        rows = positions * hidden // merged
        if rows < 1:
            raise ConfigError(f"{checkpoint.folder}: with this audio_config, an audio window has 0 embeddings")
        room = checkpoint.number("max_position_embeddings", checkpoint.sub_config("text_config"), default=_POSITIONS)
        most = max(min(_MAX_WINDOWS, room // rows), 1)
        windows = windows_of(checkpoint)._replace(rows_of_window=rows, max_windows=most)
        super().__init__(checkpoint, checkpoint.token("audio_token", "[AUDIO]"), windows, (FEATURES,))


class AudioProcessor(MediaProcessor):
    """Processor that calls Whisper's feature extractor in transformers, which runs with numpy and without torch."""

    def __init__(self, folder: Path, windows: Windows) -> None:
        # only media workers import this module, because the import takes half a second
        from transformers import WhisperFeatureExtractor

        load: Any = WhisperFeatureExtractor.from_pretrained
        self._extractor = load(str(folder), local_files_only=True)
        self._windows = windows

    def audio(self, samples: npt.NDArray[np.float32], kwargs: Mapping[str, Any]) -> ProcessedItem:
        """Process one audio clip. Raises ValueError if ``kwargs`` is not empty, because the processor accepts no
        arguments.
        """
        base.check_names(kwargs, ())
        self._windows.check(len(samples))
        return self._windows.item(self._in_windows(samples) if self._windows.rows_of_window else self._masked(samples))

    def _masked(self, samples: npt.NDArray[np.float32]) -> dict[str, TensorData]:
        given = self._extracted(samples, return_attention_mask=True, padding="max_length")
        return tensors.from_arrays({FEATURES: given[FEATURES], _MASK: given["attention_mask"]})

    def _in_windows(self, samples: npt.NDArray[np.float32]) -> dict[str, TensorData]:
        given = self._extracted(samples, padding=True, truncation=False, pad_to_multiple_of=self._windows.samples)
        windows = given[FEATURES].reshape(self._windows.bins, -1, self._windows.steps).swapaxes(0, 1)
        return tensors.from_arrays({FEATURES: windows})

    def _extracted(self, samples: npt.NDArray[np.float32], **kwargs: Any) -> dict[str, npt.NDArray[Any]]:
        given = self._extractor(samples, sampling_rate=self._windows.sampling_rate, return_tensors="np", **kwargs)
        return {name: np.asarray(value) for name, value in given.items()}


def windows_of(checkpoint: Checkpoint) -> Windows:
    """Return the format of windows from the configuration of the feature extractor. The defaults are those of its
    class.
    """
    settings = checkpoint.feature_extractor
    rate = checkpoint.number("sampling_rate", settings, default=16_000)
    samples = checkpoint.number("chunk_length", settings, default=30) * rate
    steps = samples // checkpoint.number("hop_length", settings, default=160)
    return Windows(rate, samples, steps, checkpoint.number("feature_size", settings, default=80))


def _masked_rows(length: int) -> int:
    """Return the number of embeddings that ``length`` feature steps give.

    The audio encoder's convolutions halve the length, and so does its pooling.
    """
    return ((length - 1) // 2 + 1 - 2) // 2 + 1
