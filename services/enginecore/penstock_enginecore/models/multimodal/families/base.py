"""What a family of checkpoints with towers tells of itself."""

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
    """``config``: of the whole. ``directory``: of its files. ``max_tokens``: of a prompt, and so of an item."""

    config: Any
    directory: Path
    max_tokens: int
    device: torch.device

    @cached_property
    def settings(self) -> ProcessorSettings:
        """Of its processors."""
        return ProcessorSettings.read(self.directory)


class Intake(ABC):
    """Turns items of one ``modality`` into embeddings, by ``towers``: transformers' model without its text model. Tensors have
    the names and shapes that the family's processor in transformers gives them.
    """

    modality: Modality = "image"
    attends_both_ways = False

    def __init__(self, towers: Any, checkpoint: Checkpoint) -> None:
        self.towers = towers
        self.config = checkpoint.config
        self.checkpoint = checkpoint
        self.normalization = self._normalization()

    @property
    @abstractmethod
    def specs(self) -> Mapping[str, Spec]:
        """The tensors that an item has."""

    @property
    @abstractmethod
    def max_embeds(self) -> int:
        """Embeddings of the largest item."""

    @property
    def max_tokens(self) -> int:
        return self.max_embeds

    @abstractmethod
    def count(self, tensors: Tensors) -> int:
        """Embeddings that an item's tensors make. Raises ItemError for some that make none."""

    @abstractmethod
    def encode(self, tensors: Tensors) -> torch.Tensor:
        """The rows ``[embeddings, width]`` of an item whose tensors are on the device."""

    @abstractmethod
    def largest_tensors(self) -> Tensors:
        """Those of an item as large as the model and its prompts take."""

    @property
    def processor_settings(self) -> Mapping[str, Any]:
        """The settings of the checkpoint's processor of this modality."""
        settings = self.checkpoint.settings
        return settings.video if self.modality == "video" else settings.image

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the encoder, which is that of its first floating-point weight."""
        dtypes: list[torch.dtype] = [each.dtype for each in self.towers.parameters() if each.is_floating_point()]
        return dtypes[0]

    def info(self, num_blocks: int) -> MediaInfo:
        return MediaInfo(
            modality=self.modality,
            num_blocks=num_blocks,
            max_embeds=self.max_embeds,
            max_tokens=self.max_tokens,
            attends_both_ways=self.attends_both_ways,
        )

    def pixels(self, tensor: torch.Tensor, channels: int) -> torch.Tensor:
        """Return normalized pixels in the encoder's dtype."""
        if self.normalization is None:
            raise TypeError(f"{type(self).__name__} takes no pixels")
        return self.normalization.apply(tensor, channels).to(self.dtype)

    def _normalization(self) -> Normalization | None:
        checkpoint = self.checkpoint
        return checkpoint.settings.normalization(self.processor_settings).to(checkpoint.device)


class Family:
    """A checkpoint's towers, and what its text model needs to know of them."""

    text_name: ClassVar[str] = "language_model"
    """What transformers' model calls its text model."""
    intakes: ClassVar[tuple[type[Intake], ...]]
    num_deepstack: int = 0

    def __init__(self, towers: Any, checkpoint: Checkpoint) -> None:
        self.towers = towers
        self.config = checkpoint.config
        self.by_modality: dict[Modality, Intake] = {}
        self._skip_blocks()
        for intake in self.intakes:
            made = intake(towers, checkpoint)
            self.by_modality[made.modality] = made

    @classmethod
    def unsupported(cls, config: PretrainedConfig) -> str | None:  # noqa: ARG003 - for those who have something to say
        """Why a checkpoint of this family is not served, None where it is."""
        return None

    @property
    def width(self) -> int:
        """The text model's hidden size."""
        return int(self.config.get_text_config().hidden_size)

    @cached_property
    def blocks(self) -> Sequence[torch.nn.Module]:
        """Those of the tower whose states are used, in the order in which they are computed."""
        return self._all_blocks[: self._num_used()]

    @cached_property
    def _all_blocks(self) -> list[torch.nn.Module]:
        found: list[torch.nn.Module] = [
            module for module in self.towers.modules() if isinstance(module, GradientCheckpointingLayer)
        ]
        if not found:
            raise ModelLoadError(f"{type(self.towers).__name__} is not supported: its tower has no blocks")
        return found

    def _num_used(self) -> int:
        """Blocks up to the last of those whose states make the embeddings. The states before the first block count, too."""
        layers = getattr(self.config, "vision_feature_layer", -1)
        total = len(self._all_blocks)
        chosen = [
            layer if layer >= 0 else total + 1 + layer for layer in ([layers] if isinstance(layers, int) else layers)
        ]
        return min(max(*chosen, 1), total)

    def _skip_blocks(self) -> None:
        """Blocks behind those give what they get, and have no weights."""
        for block in self._all_blocks[self._num_used() :]:
            block.forward = _unchanged  # transformers counts states by the class of blocks
            block._modules.clear()

    @property
    def rope_index(self) -> RopeIndex | None:
        """See ``MediaEncoder.rope_positions``."""
        return None


def _unchanged(hidden_states: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
    return hidden_states


# Towers that take square images of one size: CLIP's and SigLIP's.

_WITH_CLASS = "clip_vision_model"
"""Its first position is that of the class."""
SQUARE_TOWERS = (_WITH_CLASS, "siglip_vision_model")


class SquareFamily(Family):
    """A checkpoint with such a tower."""

    @classmethod
    def unsupported(cls, config: PretrainedConfig) -> str | None:
        tower: Any = config.vision_config
        if tower.model_type not in SQUARE_TOWERS:
            return f"its tower is {tower.model_type}, and not one of {', '.join(SQUARE_TOWERS)}"
        if not isinstance(tower.image_size, int) or not isinstance(tower.patch_size, int):
            return "its tower takes images that are not square"
        return None


def chosen_states(config: Any) -> dict[str, Any]:
    """Which of the tower's states make the embeddings, as arguments of transformers' model."""
    return {
        "vision_feature_layer": config.vision_feature_layer,
        "vision_feature_select_strategy": config.vision_feature_select_strategy,
    }


def positions_of_square(config: Any) -> int:
    """What a square, or a tile, gives behind ``vision_feature_select_strategy``."""
    tower = config.vision_config
    side: int = tower.image_size // tower.patch_size
    with_class = tower.model_type == _WITH_CLASS
    return side * side + int(with_class) - int(config.vision_feature_select_strategy == "default")
