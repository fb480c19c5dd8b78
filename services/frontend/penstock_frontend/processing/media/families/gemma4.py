"""Families of Gemma 4 and Gemma 4 Unified: images and video frames that keep their aspect ratio, and audio.

transformers' processors of Gemma 4 Unified need torch and torchvision, so the code here resizes with Pillow, as transformers'
processors of Gemma 4 do.

https://huggingface.co/docs/transformers/model_doc/gemma4
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from PIL.Image import Image, Resampling

from penstock_common.errors import ConfigError
from penstock_common.types.media import EMBEDS, EmbedRun, Modality, TensorData
from penstock_frontend.processing.media.families import base as arguments
from penstock_frontend.processing.media.families import tensors
from penstock_frontend.processing.media.families.base import FamilyProcessor, ProcessedItem, Replacement
from penstock_frontend.processing.media.families.checkpoint import Checkpoint
from penstock_frontend.processing.media.families.frames import Sampling
from penstock_frontend.processing.media.families.single_images import checked, grown
from penstock_frontend.processing.media.families.tensors import MediaProcessor

_COLOURS = 3
_UNIFIED = "gemma4_unified"
SOFT_TOKENS = (70, 140, 280, 560, 1120)
"""Values of ``max_soft_tokens`` that transformers' processors accept."""
_PADDED = ("num_soft_tokens_per_image", "num_soft_tokens_per_video")
"""Outputs of transformers' processors that only processors need."""
_TIME_TOKENS = 12
"""Maximum number of tokens of the time before a video frame, and of the tokens around the frame's embeddings."""


class Pictures(NamedTuple):
    """Format of pictures that are divided into patches. A square of patches becomes one embedding.

    Attributes:
        patch_size: Side length of a patch in pixels.
        merge: Number of patches along the side of the square of patches that becomes one embedding.
        merges: Whether the processor merges the square of patches into one large patch.
        max_embeds: Maximum number of embeddings of a picture.
        resample: Pillow's resampling filter.
    """

    patch_size: int
    merge: int
    merges: bool
    max_embeds: int
    resample: int
    names: tuple[str, ...] = ("pixel_values", "image_position_ids", _PADDED[0])

    @property
    def max_rows(self) -> int:
        """Maximum number of embeddings of an image."""
        return self.max_embeds

    @property
    def side(self) -> int:
        """Side length in pixels of the square that becomes one embedding."""
        return self.patch_size * self.merge

    def item(self, data: Mapping[str, TensorData]) -> ProcessedItem:
        """Return the media item for the tensors ``pixel_values`` ``[1, patches, elements of a patch]`` and
        ``image_position_ids`` ``[1, patches, 2]``.
        """
        return ProcessedItem(modality="image", data=_needed(data), num_embeds=self.rows_of(data))

    def rows_of(self, data: Mapping[str, TensorData]) -> int:
        """Return the number of embeddings of an image. Raises ValueError unless the patches form a grid in order of rows,
        with padding after the last patch only.
        """
        pixels, positions, _ = self.names
        size = self.side if self.merges else self.patch_size
        shape = tensors.taken(data, positions, (1, None, 2)).shape
        tensors.taken(data, pixels, (*shape[:2], _COLOURS * size**2))
        given = np.array(tensors.numbers(data, positions, shape)).reshape(shape)
        width, height = (int(side) + 1 for side in given[0].max(axis=0)) if given.size else (0, 0)
        merge = 1 if self.merges else self.merge
        count, padding = width * height, np.full((shape[1], 2), -1)
        if not 0 < count <= shape[1] or width % merge or height % merge:
            raise ValueError(
                f"{positions} has positions up to {height} x {width} for {shape[1]} patches; the positions must form a "
                f"grid whose sides are multiples of {merge}"
            )
        padding[:count] = _grid(width, height)
        if not (given == padding).all():
            raise ValueError(
                f"{positions} must have the positions of a {height} x {width} grid in order of rows, and then only -1"
            )
        return count // merge**2

    def arguments(self, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the processor argument ``max_soft_tokens``, which is at most the value in the checkpoint."""
        arguments.check_names(kwargs, ("max_soft_tokens",))
        return {"max_soft_tokens": self.budget(kwargs)}

    def budget(self, kwargs: Mapping[str, Any]) -> int:
        """Return the maximum number of embeddings of a picture, from the arguments of a request."""
        value = arguments.whole_number(kwargs, "max_soft_tokens", most=self.max_embeds)
        if value is not None and value not in SOFT_TOKENS:
            known = ", ".join(str(each) for each in SOFT_TOKENS)
            raise ValueError(f"processor_kwargs.max_soft_tokens is {value}; it must be one of {known}")
        return value or self.max_embeds

    def processed(self, picture: Image, budget: int) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
        """Return the patches of a picture ``[patches, elements of a patch]``, and their positions ``[patches, 2]``."""
        width, height = self.size_of(picture.width, picture.height, budget)
        if (width, height) != picture.size:
            picture = picture.resize((width, height), Resampling(self.resample))
        size = self.side if self.merges else self.patch_size
        pixels = np.asarray(picture, dtype=np.uint8).reshape(height // size, size, width // size, size, _COLOURS)
        return pixels.transpose(0, 2, 1, 3, 4).reshape(-1, size * size * _COLOURS), _grid(width // size, height // size)

    def size_of(self, width: int, height: int, budget: int) -> tuple[int, int]:
        """Return the width and the height to which a picture is resized: the largest size with about the same aspect ratio
        and at most ``budget`` embeddings. The arithmetic is that of transformers' processor.
        """
        factor = math.sqrt(budget * self.merge**2 * self.patch_size**2 / (height * width))
        rows, columns = (math.floor(factor * each / self.side) for each in (height, width))
        if not rows:
            rows, columns = 1, min(width // height, budget)
        elif not columns:
            rows, columns = min(height // width, budget), 1
        return columns * self.side, rows * self.side


class Videos(NamedTuple):
    """Format of videos whose frames are pictures. ``max_frames`` is the maximum number of frames."""

    pictures: Pictures
    max_frames: int
    pixels: str = "pixel_values_videos"
    positions: str = "video_position_ids"
    counts: str = "num_frames_per_video"

    def video(self, frames: Sequence[Image], timestamps: Sequence[float], kwargs: Mapping[str, Any]) -> ProcessedItem:
        """Process the frames of a video, which have one size. Accepts the arguments ``max_soft_tokens``, ``fps`` and
        ``num_frames``. Raises ValueError if an argument is not valid.
        """
        arguments.check_names(kwargs, ("max_soft_tokens", "fps", "num_frames"))
        indices = Sampling(1, self.max_frames).indices(timestamps, kwargs)
        budget = self.pictures.budget(kwargs)
        made = [self.pictures.processed(frames[index], budget) for index in indices]
        data: dict[str, npt.NDArray[Any]] = {
            self.pixels: np.stack([pixels for pixels, _ in made]),
            self.positions: np.stack([positions for _, positions in made]),
            self.counts: np.array([len(made)]),
        }
        rows = len(made[0][1]) if self.pictures.merges else len(made[0][1]) // self.pictures.merge**2
        seconds = [int(timestamps[index]) for index in indices]
        return ProcessedItem(
            modality="video",
            data=tensors.from_arrays(data),
            num_embeds=len(made) * rows,
            layout=(rows, *seconds),
        )


class Clips(NamedTuple):
    """Format of audio clips.

    Attributes:
        sampling_rate: Sampling rate in Hz.
        width: Number of elements of a feature vector.
        samples_of_embed: Number of samples of one embedding.
        max_embeds: Maximum number of embeddings of a clip.
        raw: Whether feature vectors are samples. Otherwise, they are frames of a mel spectrogram.
        least: Minimum number of samples of a clip.
    """

    sampling_rate: int
    width: int
    samples_of_embed: int
    max_embeds: int
    raw: bool
    least: int
    names: tuple[str, ...] = ("input_features", "input_features_mask")

    def item(self, data: Mapping[str, TensorData]) -> ProcessedItem:
        """Return the media item for the tensors ``input_features`` ``[1, vectors, elements]`` and
        ``input_features_mask`` ``[1, vectors]``.
        """
        features, mask = self.names
        count = tensors.taken(data, features, (1, None, self.width)).shape[1]
        taken = tensors.to_array(tensors.taken(data, mask, (1, count)))[0].astype(bool)
        length = int(taken.sum())
        rows = length if self.raw else -(-length // 4)
        if not length or not taken[:length].all() or rows > self.max_embeds:
            raise ValueError(
                f"{mask} selects {length} of {count} vectors, or {rows} embeddings; the selected vectors must be the first "
                f"vectors of the clip, and have from 1 to {self.max_embeds} embeddings"
            )
        return ProcessedItem(modality="audio", data=dict(data), num_embeds=rows)

    def check(self, num_samples: int) -> None:
        """Raise ValueError if an audio clip is too long, or if it is too short for one embedding."""
        rate, most = self.sampling_rate, self.samples_of_embed * self.max_embeds
        if not self.least <= num_samples <= most:
            raise ValueError(
                f"it has {num_samples / rate:.4f} s of sound ({num_samples} samples at {rate} Hz); the model accepts clips "
                f"from {self.least / rate:.4f} s ({self.least} samples) to {most / rate:g} s"
            )


class Formats(NamedTuple):
    """Formats of the media of a checkpoint. A format is None if the checkpoint does not accept the modality."""

    images: Pictures | None
    videos: Videos | None
    clips: Clips | None


class Gemma4:
    """Family whose media have a begin token, one token for each embedding, and an end token. The time of each video frame
    precedes the frame as text.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.identity = checkpoint.identity
        self._folder = checkpoint.folder
        self._encode = checkpoint.encode
        self._formats = _formats(checkpoint)
        self._tokens: dict[Modality, str] = {}
        self._around: dict[Modality, tuple[str, str]] = {}
        self._begin, self._end = checkpoint.token("boi_token", "<|image>"), checkpoint.token("eoi_token", "<image|>")
        if self._formats.images is not None:
            self._tokens["image"] = checkpoint.token("image_token", "<|image|>")
        if self._formats.videos is not None:
            self._tokens["video"] = "<|video|>"
        if self._formats.clips is not None:
            self._tokens["audio"] = checkpoint.token("audio_token", "<|audio|>")
        if not self._tokens:
            raise ConfigError(f"{checkpoint.folder}: config.json has neither vision_config nor audio_config")
        boa, eoa = checkpoint.token("boa_token", "<|audio>"), checkpoint.token("eoa_token", "<audio|>")
        self._around = {"image": (self._begin, self._end), "video": (self._begin, self._end), "audio": (boa, eoa)}
        around = [token for modality in self._tokens for token in self._around[modality]]
        self._ids = {token: checkpoint.token_id(token) for token in (*self._tokens.values(), *around)}
        self.media_tokens = tuple(self._ids)
        self.modalities: frozenset[Modality] = frozenset(self._tokens)
        self.sampling_rate = 0 if self._formats.clips is None else self._formats.clips.sampling_rate

    def placeholder(self, modality: Modality) -> str:
        """Return the placeholder token for this modality, or any placeholder if the model does not support the modality."""
        return self._tokens.get(modality) or next(iter(self._tokens.values()))

    def replacements(self, items: Sequence[ProcessedItem]) -> list[Replacement]:
        """Return the replacement of each media item in the prompt."""
        return [self._replacement(item) for item in items]

    def _replacement(self, item: ProcessedItem) -> Replacement:
        token = self._tokens[item.modality]
        if item.modality == "video":
            rows, *seconds = item.layout
            times = [f"{each // 60:02d}:{each % 60:02d} " for each in seconds]
            text = "".join(f"{self._begin}{token}{self._end} {time}" for time in times[1:])
            last = f"{self._begin}{token}{self._end}"
            return grown(self._encode(f"{text}{last}"), self._ids[token], rows, before=times[0])
        begin, end = (self._ids[each] for each in self._around[item.modality])
        token_ids = [begin, *[self._ids[token]] * item.num_embeds, end]
        return Replacement(token_ids, (EmbedRun(1, item.num_embeds),))

    def described(self, modality: Modality, data: Mapping[str, TensorData]) -> ProcessedItem:
        """Return the media item for tensors of a processor, or for embeddings. The tensors of a video do not contain the
        times of its frames, so a video is refused.
        """
        if modality == "video":
            raise ValueError("the tensors of a video do not contain the times of its frames, which the prompt needs")
        images, clips = self._formats.images, self._formats.clips
        if modality == "audio" and clips is not None:
            names, most, item = clips.names, clips.max_embeds, clips.item
        elif modality == "image" and images is not None:
            names, most, item = images.names, images.max_embeds, partial(checked, images)
        else:
            raise ValueError(f"the model accepts no {modality}")
        if EMBEDS in data:
            rows = tensors.num_embeds(data, least=1, most=most)
            return ProcessedItem(modality=modality, data=dict(data), num_embeds=rows)
        tensors.check_names(data, names)
        return item(data)

    def max_tokens(self, modality: Modality) -> int:
        """Return the number of tokens from the first embedding to the last embedding of the largest media item."""
        images, videos, clips = self._formats
        if modality == "video" and videos is not None:
            return videos.max_frames * (videos.pictures.max_embeds + _TIME_TOKENS)
        if modality == "audio" and clips is not None:
            return clips.max_embeds
        return images.max_embeds if images is not None else 0

    def make_processor(self) -> Callable[[], FamilyProcessor]:
        """Return a function that creates a ``Processor``."""
        return partial(Processor, self._folder, self._formats)


class Processor(MediaProcessor):
    """Processor of images, video and audio. Only mel spectrograms are computed by transformers, with numpy."""

    def __init__(self, folder: Path, formats: Formats) -> None:
        self._images, self._videos, self._clips = formats
        self._extractor: Any = None
        if self._clips is not None and not self._clips.raw:
            # only media workers import this module, because the import takes half a second
            from transformers.models.gemma4.feature_extraction_gemma4 import Gemma4AudioFeatureExtractor

            load: Any = Gemma4AudioFeatureExtractor.from_pretrained
            self._extractor = load(str(folder), local_files_only=True)

    def image(self, image: Image, kwargs: Mapping[str, Any]) -> ProcessedItem:
        """Process one image. Accepts the argument ``max_soft_tokens``."""
        if self._images is None:
            return super().image(image, kwargs)
        pixels, positions = self._images.processed(image, self._images.arguments(kwargs)["max_soft_tokens"])
        names = self._images.names
        data = tensors.from_arrays({names[0]: pixels[None], names[1]: positions[None]})
        rows = len(positions) if self._images.merges else len(positions) // self._images.merge**2
        return ProcessedItem(modality="image", data=data, num_embeds=rows)

    def video(self, frames: Sequence[Image], timestamps: Sequence[float], kwargs: Mapping[str, Any]) -> ProcessedItem:
        """Process the frames of a video, with the arguments of ``Videos.video``."""
        if self._videos is None:
            return super().video(frames, timestamps, kwargs)
        return self._videos.video(frames, timestamps, kwargs)

    def audio(self, samples: npt.NDArray[np.float32], kwargs: Mapping[str, Any]) -> ProcessedItem:
        """Process one audio clip. Raises ValueError if ``kwargs`` is not empty, because the processor accepts no
        arguments.
        """
        if self._clips is None:
            return super().audio(samples, kwargs)
        arguments.check_names(kwargs, ())
        self._clips.check(len(samples))
        if self._clips.raw:
            padded = np.pad(samples.astype(np.float32), (0, -len(samples) % self._clips.width))
            features = padded.reshape(1, -1, self._clips.width)
            made = {"input_features": features, "input_features_mask": np.ones(features.shape[:2], dtype=bool)}
        else:
            rate = self._clips.sampling_rate
            given = self._extractor([samples], sampling_rate=rate, truncation=False, return_tensors="np")
            made = {name: np.asarray(value) for name, value in given.items()}
        return self._clips.item(tensors.from_arrays(made))


def _formats(checkpoint: Checkpoint) -> Formats:
    """Return the formats of media from the configuration of the checkpoint. The defaults are those of transformers'
    processors. Raises ConfigError if a value in the configuration is not valid.
    """
    images = videos = clips = None
    if checkpoint.sub_config("vision_config"):
        images = _pictures(checkpoint, checkpoint.image_processor, 280)
        settings = checkpoint.video_processor
        # transformers' processor adds this token to tokenizers without it, under an id that the model does not know
        if len(checkpoint.encode("<|video|>")) == 1:
            frames = checkpoint.number("num_frames", settings, default=32)
            videos = Videos(_pictures(checkpoint, settings, 70), frames)
    if checkpoint.sub_config("audio_config"):
        clips = _clips(checkpoint)
    return Formats(images, videos, clips)


def _pictures(checkpoint: Checkpoint, settings: Mapping[str, Any], most: int) -> Pictures:
    tower = checkpoint.sub_config("vision_config")
    budget = checkpoint.number("max_soft_tokens", settings, default=most)
    if budget not in SOFT_TOKENS:
        known = ", ".join(str(each) for each in SOFT_TOKENS)
        raise ConfigError(f"{checkpoint.folder}: max_soft_tokens of a processor is {budget}; it must be one of {known}")
    return Pictures(
        patch_size=checkpoint.number("patch_size", settings, tower, default=16),
        merge=checkpoint.number("pooling_kernel_size", settings, tower, default=3),
        merges=checkpoint.model_type == _UNIFIED,
        max_embeds=budget,
        resample=checkpoint.number("resample", settings, default=int(Resampling.BICUBIC)),
    )


def _clips(checkpoint: Checkpoint) -> Clips:
    settings = checkpoint.feature_extractor
    rate = checkpoint.number("sampling_rate", settings, default=16_000)
    most = checkpoint.number("audio_seq_length", checkpoint.processor, default=750)
    if checkpoint.model_type == _UNIFIED:
        samples = checkpoint.number(
            "audio_samples_per_token", settings, {"audio_samples_per_token": settings.get("feature_size")}, default=640
        )
        return Clips(rate, samples, samples, most, raw=True, least=1)
    hop, frame = (round(rate * settings.get(name, ms) / 1000) for name, ms in _FRAMES.items())
    # A frame needs one sample more than its length, and zeros precede the first half of the first frame.
    least = frame + 1 - frame // 2
    return Clips(rate, checkpoint.number("feature_size", settings, default=128), 4 * hop, most, raw=False, least=least)


_FRAMES = {"hop_length_ms": 10.0, "frame_length_ms": 20.0}
"""Settings of the feature extractor in milliseconds: the distance and the length of frames."""


def _grid(width: int, height: int) -> npt.NDArray[np.int64]:
    """Return the positions ``[width * height, 2]`` of a grid: the column and the row of each patch, in order of rows."""
    rows, columns = np.divmod(np.arange(width * height), width)
    return np.stack([columns, rows], axis=-1)


def _needed(data: Mapping[str, TensorData]) -> dict[str, TensorData]:
    return {name: tensor for name, tensor in data.items() if name not in _PADDED}
