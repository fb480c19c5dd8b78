"""Base classes for families of checkpoints with media encoders."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import torch
from transformers import PretrainedConfig
from transformers.modeling_layers import GradientCheckpointingLayer

from penstock_common.types.media import Modality
from penstock_enginecore.core.model_info import MediaInfo
from penstock_enginecore.models.errors import ModelLoadError
from penstock_enginecore.models.multimodal.base import RopeIndex, Spec
from penstock_enginecore.models.multimodal.processors import Normalization, ProcessorSettings

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Checkpoint:
    """Checkpoint with media encoders.

    Attributes:
        config: Configuration of the complete model.
        directory: Folder of the checkpoint's files.
        max_tokens: Maximum number of tokens in a prompt, and therefore in an item.
    """

    config: Any
    directory: Path
    max_tokens: int
    device: torch.device

    @cached_property
    def settings(self) -> ProcessorSettings:
        """Settings of the checkpoint's media processors."""
        return ProcessorSettings.read(self.directory)


class Intake(ABC):
    """Encodes items of one ``modality``.

    ``towers`` is transformers' model without its text model. Tensors have the names and shapes that the model's
    transformers processor returns.
    """

    modality: Modality = "image"

    def __init__(self, towers: Any, checkpoint: Checkpoint) -> None:
        self.towers = towers
        self.config = checkpoint.config
        self.checkpoint = checkpoint
        self.normalization = self._normalization()

    @property
    @abstractmethod
    def specs(self) -> Mapping[str, Spec]:
        """Requirements on the tensors of an item."""

    @property
    @abstractmethod
    def max_embeds(self) -> int:
        """Number of embeddings of the largest item."""

    @property
    def max_tokens(self) -> int:
        return self.max_embeds

    @property
    def attends_both_ways(self) -> bool:
        """Whether the embeddings of an item attend to each other."""
        return False

    @property
    def max_span(self) -> int:
        """Number of positions of the largest group of embeddings that attend to each other."""
        return self.max_tokens

    @abstractmethod
    def count(self, tensors: Tensors) -> int:
        """Return the number of embeddings that the encoder computes from an item's tensors. Raises ItemError if the
        tensors are not valid.
        """

    @abstractmethod
    def encode(self, tensors: Tensors) -> torch.Tensor:
        """Return the embeddings ``[embeddings, width]`` of an item whose tensors are on the device."""

    @abstractmethod
    def largest_tensors(self) -> Tensors:
        """Return the tensors of an item of the largest size that the model accepts and that fits into a prompt."""

    @property
    def processor_settings(self) -> Mapping[str, Any]:
        """The settings of the checkpoint's processor of this modality."""
        settings = self.checkpoint.settings
        return settings.video if self.modality == "video" else settings.image

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which the encoder computes, which is the dtype of its first floating-point weight."""
        dtypes: list[torch.dtype] = [each.dtype for each in self.towers.parameters() if each.is_floating_point()]
        return dtypes[0]

    def info(self, num_blocks: int) -> MediaInfo:
        return MediaInfo(
            modality=self.modality,
            num_blocks=num_blocks,
            max_embeds=self.max_embeds,
            max_tokens=self.max_tokens,
            max_span=self.max_span if self.attends_both_ways else 0,
        )

    def pixels(self, tensor: torch.Tensor, channels: int) -> torch.Tensor:
        """Return normalized pixels in the encoder's dtype."""
        if self.normalization is None:
            raise TypeError(f"{type(self).__name__} does not accept pixels")
        return self.normalization.apply(tensor, channels).to(self.dtype)

    def _normalization(self) -> Normalization | None:
        checkpoint = self.checkpoint
        return checkpoint.settings.normalization(self.processor_settings).to(checkpoint.device)


class Family:
    """Media encoders of a checkpoint, and their properties that the text model needs."""

    intakes: ClassVar[tuple[type[Intake], ...]]
    num_deepstack: int = 0
    eager_sections: ClassVar[tuple[str, ...]] = ()
    """Sections of the configuration whose encoders have only attention of their own (``eager``) in transformers."""
    windowed_spans = False
    """Whether embeddings attend to later embeddings only in layers with a sliding window."""

    def __init__(self, towers: Any, checkpoint: Checkpoint) -> None:
        self.towers = towers
        self.config = checkpoint.config
        self.by_modality: dict[Modality, Intake] = {}
        self._skip_blocks()
        for intake in self._served(checkpoint.config):
            made = intake(towers, checkpoint)
            self.by_modality[made.modality] = made

    @classmethod
    def unsupported(cls, config: PretrainedConfig) -> str | None:  # noqa: ARG003 - subclasses use it
        """Return why a checkpoint of this family is not supported, or None if it is supported."""
        return None

    @classmethod
    def _served(cls, config: Any) -> tuple[type[Intake], ...]:  # noqa: ARG003 - subclasses use it
        """Return the intakes for a checkpoint with this configuration."""
        return cls.intakes

    @property
    def width(self) -> int:
        """The text model's hidden size."""
        return int(self.config.get_text_config().hidden_size)

    @cached_property
    def blocks(self) -> Sequence[torch.nn.Module]:
        """Blocks of the media encoder whose hidden states are used, in order of computation."""
        return self._all_blocks[: self._num_used()]

    def blocks_of(self, modality: Modality) -> Sequence[torch.nn.Module]:  # noqa: ARG002 - subclasses use it
        """Return the blocks that compute an item of this modality."""
        return self.blocks

    @cached_property
    def _all_blocks(self) -> list[torch.nn.Module]:
        found: list[torch.nn.Module] = [
            module for module in self.towers.modules() if isinstance(module, GradientCheckpointingLayer)
        ]
        if not found:
            raise ModelLoadError(f"{type(self.towers).__name__} is not supported: its media encoder has no blocks")
        return found

    def _num_used(self) -> int:
        """Return the number of blocks up to the last block whose hidden states are used for the embeddings. In the
        configuration, index 0 means the states before the first block.
        """
        layers = getattr(self.config, "vision_feature_layer", -1)
        total = len(self._all_blocks)
        chosen = [
            layer if layer >= 0 else total + 1 + layer for layer in ([layers] if isinstance(layers, int) else layers)
        ]
        return min(max(*chosen, 1), total)

    def _skip_blocks(self) -> None:
        """Replace the last blocks, whose hidden states are not used, by blocks without weights that return their
        input.
        """
        for block in self._all_blocks[self._num_used() :]:
            block.forward = _unchanged  # transformers recognizes blocks by their class when it collects hidden states
            block._modules.clear()

    @property
    def rope_index(self) -> RopeIndex | None:
        """Function for rotary positions; see ``MediaEncoder.rope_positions``."""
        return None


def _unchanged(hidden_states: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
    return hidden_states


# Vision encoders for square images of one size: CLIP and SigLIP.

_WITH_CLASS = "clip_vision_model"
"""Model type of the encoder whose first position is the class token."""
SQUARE_TOWERS = (_WITH_CLASS, "siglip_vision_model")


class SquareFamily(Family):
    """Checkpoint with a vision encoder for square images."""

    @classmethod
    def unsupported(cls, config: PretrainedConfig) -> str | None:
        tower: Any = config.vision_config
        if tower.model_type not in SQUARE_TOWERS:
            return f"its vision encoder is {tower.model_type}; supported are {', '.join(SQUARE_TOWERS)}"
        if not isinstance(tower.image_size, int) or not isinstance(tower.patch_size, int):
            return "its vision encoder uses images that are not square"
        return None


def chosen_states(config: Any) -> dict[str, Any]:
    """Return the arguments of transformers' model that select the encoder's states for the embeddings."""
    return {
        "vision_feature_layer": config.vision_feature_layer,
        "vision_feature_select_strategy": config.vision_feature_select_strategy,
    }


def positions_of_square(config: Any) -> int:
    """Return the number of embeddings of a square image or tile, with or without the class token as
    ``vision_feature_select_strategy`` says.
    """
    tower = config.vision_config
    side: int = tower.image_size // tower.patch_size
    with_class = tower.model_type == _WITH_CLASS
    return side * side + int(with_class) - int(config.vision_feature_select_strategy == "default")
