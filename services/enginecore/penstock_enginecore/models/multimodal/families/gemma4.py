"""Gemma 4: images and video as grids of patches, and audio. Gemma 4 Unified has no encoder layers, and projects pixels and
samples.
"""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar

import torch
from transformers import PretrainedConfig

from penstock_common.types.media import Modality
from penstock_enginecore.models.errors import ModelLoadError
from penstock_enginecore.models.multimodal.base import FLOATS, INTEGERS, MASKS, PIXELS, ItemError, Spec
from penstock_enginecore.models.multimodal.families.base import Family, Intake, Tensors
from penstock_enginecore.models.multimodal.processors import Normalization

_COLOURS = 3
_FEATURES, _MASK = "input_features", "input_features_mask"
_NUM_FRAMES = "num_frames_per_video"
_IMAGE_EMBEDS, _FRAME_EMBEDS, _AUDIO_EMBEDS = 280, 70, 750
"""Maximum number of embeddings of an image, of a video frame and of an audio clip, if the checkpoint's processors do not
set it.
"""
_MAX_FRAMES = 32
_TIME_TOKENS = 12
"""Maximum number of tokens of the time before a video frame, and of the tokens around the frame's embeddings."""
_TWO_WAY = "vision"


class _Pictures(Intake):
    """Pictures of one size as patches, whose positions are tensors of the item. A square of patches becomes one
    embedding.
    """

    pixels_name, positions_name = "pixel_values", "image_position_ids"
    default_embeds = _IMAGE_EMBEDS
    counts: Mapping[str, Spec] = {"num_soft_tokens_per_image": Spec(INTEGERS, (1,), wanted=False)}
    """Tensors of transformers' processors that the encoder does not need."""

    @property
    def attends_both_ways(self) -> bool:
        return bool(self.config.get_text_config().use_bidirectional_attention == _TWO_WAY)

    @property
    def merge(self) -> int:
        """Side of the square of patches that becomes one embedding, as a number of patches."""
        return int(self.config.vision_config.pooling_kernel_size)

    @property
    def patch_size(self) -> int:
        """Side of a patch in pixels."""
        return int(self.config.vision_config.patch_size)

    @property
    def max_position(self) -> int:
        """Number of patches along the longest side for which the model has positions."""
        return int(self.config.vision_config.position_embedding_size)

    @property
    def max_pictures(self) -> int:
        """Maximum number of pictures of an item."""
        return 1

    @property
    def picture_embeds(self) -> int:
        """Maximum number of embeddings of a picture."""
        most = int(self.processor_settings.get("max_soft_tokens") or self.default_embeds)
        return max(min(most, self.max_position // self.merge, self.checkpoint.max_tokens), 1)

    @property
    def specs(self) -> Mapping[str, Spec]:
        pictures = 1 if self.max_pictures == 1 else None
        numbers = _COLOURS * self.patch_size**2
        return {
            self.pixels_name: Spec(PIXELS, (pictures, None, numbers)),
            self.positions_name: Spec(INTEGERS, (pictures, None, 2)),
            **self.counts,
        }

    @property
    def max_embeds(self) -> int:
        return self.max_pictures * self.picture_embeds

    def count(self, tensors: Tensors) -> int:
        positions, pixels = tensors[self.positions_name], tensors[self.pixels_name]
        if pixels.shape[:2] != positions.shape[:2]:
            raise ItemError(
                f"{self.positions_name} has the shape {list(positions.shape)}, but {self.pixels_name} has the shape "
                f"{list(pixels.shape)}; the first two numbers must be equal"
            )
        if len(positions) > self.max_pictures:
            raise ItemError(f"{self.pixels_name} has {len(pixels)} pictures; the limit is {self.max_pictures}")
        embeds = self._grid(positions) // self.merge**2
        if embeds > self.picture_embeds:
            raise ItemError(f"a picture has {embeds} embeddings; the limit is {self.picture_embeds}")
        return len(positions) * embeds

    def encode(self, tensors: Tensors) -> torch.Tensor:
        """Encode the pictures without padding. The encoder converts the pixels to its dtype after further arithmetic."""
        positions = tensors[self.positions_name].long()
        patches = _num_patches(positions)
        pixels = tensors[self.pixels_name][:, :patches]
        if self.normalization is None:
            raise TypeError(f"{type(self).__name__} has no normalization")
        pixels = self.normalization.apply(pixels.reshape(*pixels.shape[:2], -1, _COLOURS), 3).flatten(2)
        return torch.cat([*self.towers.get_image_features(pixels, positions[:, :patches]).pooler_output])

    def largest_tensors(self) -> Tensors:
        height, width = self.merge, self.merge * self.picture_embeds
        rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
        positions = torch.stack([columns, rows], dim=-1).view(1, -1, 2).repeat(self.max_pictures, 1, 1)
        numbers = _COLOURS * self.patch_size**2
        return {
            self.pixels_name: torch.zeros(*positions.shape[:2], numbers, dtype=torch.uint8),
            self.positions_name: positions,
        }

    def _grid(self, positions: torch.Tensor) -> int:
        """Return the number of patches of each picture. Raises ItemError unless the patches of each picture are a grid in
        order of rows, with padding after the last patch only.
        """
        patches = _num_patches(positions)
        given = positions[0, :patches].long()
        width, height = (int(side) + 1 for side in given.amax(0)) if patches else (0, 0)
        sides = f"{self.positions_name} has {patches} patches and positions up to {height} x {width}"
        if width * height != patches or not patches or width % self.merge or height % self.merge:
            raise ItemError(f"{sides}; they must be a grid whose sides are multiples of {self.merge}")
        if max(width, height) > self.max_position:
            raise ItemError(f"{sides}; the limit for a side is {self.max_position}")
        order = torch.arange(patches)
        expected = torch.stack([order % width, order // width], dim=-1)
        padded = bool((positions[:, patches:] == -1).all())
        if not padded or not bool((positions[:, :patches] == expected).all()):
            raise ItemError(
                f"{self.positions_name} must have the positions of a {height} x {width} grid in order of rows, the same "
                "for all pictures, and then only -1"
            )
        return patches

    def _normalization(self) -> Normalization:
        """Return the normalization of the checkpoint's processors, which by default only divide by 255."""
        known: dict[str, Any] = {
            "do_rescale": True,
            "rescale_factor": 1 / 255,
            "do_normalize": self.modality == "video",
            "image_mean": [0.0] * _COLOURS,
            "image_std": [1.0] * _COLOURS,
        }
        settings = self.processor_settings
        known |= {key: settings[key] for key in known if settings.get(key) is not None}
        return Normalization.of(known).to(self.checkpoint.device)


class _Video(_Pictures):
    """Video in which each frame is a picture. The embeddings of each frame attend to each other."""

    modality: Modality = "video"
    pixels_name, positions_name = "pixel_values_videos", "video_position_ids"
    default_embeds = _FRAME_EMBEDS
    counts: Mapping[str, Spec] = {
        _NUM_FRAMES: Spec(INTEGERS, (1,), wanted=False),
        "num_soft_tokens_per_video": Spec(INTEGERS, (1,), wanted=False),
    }

    @property
    def max_pictures(self) -> int:
        frames = int(self.processor_settings.get("num_frames") or _MAX_FRAMES)
        return max(min(frames, self.checkpoint.max_tokens // self.picture_embeds), 1)

    @property
    def max_tokens(self) -> int:
        return self.max_embeds + self.max_pictures * _TIME_TOKENS

    @property
    def max_span(self) -> int:
        return self.picture_embeds

    @property
    def specs(self) -> Mapping[str, Spec]:
        numbers = _COLOURS * self.patch_size**2
        return {
            self.pixels_name: Spec(PIXELS, (None, None, numbers)),
            self.positions_name: Spec(INTEGERS, (None, None, 2)),
            **self.counts,
        }


class _Merged(_Pictures):
    """Pictures whose patches were merged before: each patch is one embedding."""

    merge = 1

    @property
    def patch_size(self) -> int:
        return int(self.config.vision_config.patch_size * self.config.vision_config.pooling_kernel_size)

    @property
    def max_position(self) -> int:
        return int(self.config.vision_config.mm_posemb_size)


class _MergedVideo(_Merged, _Video):
    """Video frames whose patches were merged before."""


class _Audio(Intake):
    """Audio as feature vectors with a mask, which is 0 for padding at the end."""

    modality: Modality = "audio"

    @property
    def width(self) -> int:
        """Number of elements of a feature vector."""
        return int(self.checkpoint.settings.audio.get("feature_size") or self._width)

    @property
    def specs(self) -> Mapping[str, Spec]:
        return {_FEATURES: Spec(FLOATS, (1, None, self.width)), _MASK: Spec(MASKS, (1, None))}

    @property
    def max_embeds(self) -> int:
        most = int(self.checkpoint.settings.processor.get("audio_seq_length") or _AUDIO_EMBEDS)
        return max(min(most, self.checkpoint.max_tokens), 1)

    def count(self, tensors: Tensors) -> int:
        mask, features = tensors[_MASK][0].bool(), tensors[_FEATURES]
        if len(mask) != features.shape[1]:
            raise ItemError(f"{_MASK} has {len(mask)} elements, but {_FEATURES} has {features.shape[1]} vectors")
        length = int(mask.sum())
        if not length or not bool(mask[:length].all()):
            raise ItemError(f"{_MASK} must be 1 from the first vector to the end of the sound, and 0 after the end")
        if (embeds := self.embeds_of(length)) > self.max_embeds:
            raise ItemError(f"{_MASK} selects vectors of {embeds} embeddings; the limit is {self.max_embeds}")
        return embeds

    def encode(self, tensors: Tensors) -> torch.Tensor:
        mask = tensors[_MASK].bool()
        found = self.towers.get_audio_features(tensors[_FEATURES].float(), mask)
        rows: torch.Tensor = found.pooler_output[found.attention_mask]
        return rows

    def largest_tensors(self) -> Tensors:
        length = self.max_embeds * self.per_embed
        return {_FEATURES: torch.zeros(1, length, self.width), _MASK: torch.ones(1, length, dtype=torch.bool)}

    def embeds_of(self, length: int) -> int:
        """Return the number of embeddings of ``length`` feature vectors."""
        return -(-length // self.per_embed)

    per_embed = 4
    """Number of feature vectors of one embedding. Each of the encoder's two convolutions halves the number."""
    _width = 128

    def _normalization(self) -> Normalization | None:
        return None


class _Spectrogram(_Audio):
    """Audio as a mel spectrogram."""

    def __init__(self, towers: Any, checkpoint: Any) -> None:
        super().__init__(towers, checkpoint)
        audio = self.config.audio_config
        bins = -(-self.width // self.per_embed) * audio.subsampling_conv_channels[1]
        if bins != (wanted := towers.audio_tower.subsample_conv_projection.input_proj_linear.in_features):
            raise ModelLoadError(
                f"feature_size of the checkpoint's feature extractor is {self.width}, which gives {bins} numbers per step "
                f"of the audio encoder; the encoder needs {wanted}"
            )


class _Samples(_Audio):
    """Audio as samples: each vector has the samples of one embedding."""

    per_embed = 1

    @property
    def width(self) -> int:
        return int(self.config.audio_config.audio_embed_dim)


class Gemma4(Family):
    """Gemma 4 with a vision encoder, and with an audio encoder in the smaller models."""

    windowed_spans = True
    eager_sections: ClassVar[tuple[str, ...]] = ("audio_config",)
    intakes: ClassVar[tuple[type[Intake], ...]] = (_Pictures, _Video, _Spectrogram)

    @classmethod
    def unsupported(cls, config: PretrainedConfig) -> str | None:
        if config.get_text_config().use_bidirectional_attention == "all":
            return "use_bidirectional_attention of its text model is 'all', so that all tokens attend to later tokens"
        if not cls._served(config):
            return "it has neither vision_config nor audio_config"
        return None

    @classmethod
    def _served(cls, config: Any) -> tuple[type[Intake], ...]:
        """Return the intakes of the encoders that the checkpoint has."""
        vision, video, audio = cls.intakes
        pictures = () if config.vision_config is None else (vision, video)
        return pictures if config.audio_config is None else (*pictures, audio)

    @cached_property
    def _all_blocks(self) -> list[torch.nn.Module]:
        return [block for modality in self.by_modality for block in self.blocks_of(modality)]

    def _skip_blocks(self) -> None:
        """Keep all blocks, because the encoders use the hidden states of their last blocks."""

    def blocks_of(self, modality: Modality) -> Sequence[torch.nn.Module]:
        """Return the layers of the encoder of this modality."""
        towers = self.towers
        return list(towers.audio_tower.layers if modality == "audio" else towers.vision_tower.encoder.layers)


class Gemma4Unified(Gemma4):
    """Gemma 4 without encoder layers. The projection of an item counts as one block."""

    intakes: ClassVar[tuple[type[Intake], ...]] = (_Merged, _MergedVideo, _Samples)

    def blocks_of(self, modality: Modality) -> Sequence[torch.nn.Module]:
        """Return the module that projects an item of this modality."""
        return [self.towers.embed_audio if modality == "audio" else self.towers.embed_vision]


def _num_patches(positions: torch.Tensor) -> int:
    """Return the number of patches of the first picture in ``positions`` ``[pictures, patches, 2]``, without padding."""
    return int((positions[0] != -1).all(-1).sum())
