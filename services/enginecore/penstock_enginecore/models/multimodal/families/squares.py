"""Towers that take square images of one size: CLIP's and SigLIP's."""

from typing import Any

from transformers import PretrainedConfig

from penstock_enginecore.models.multimodal.families.base import Family

_WITH_CLASS = "clip_vision_model"
"""Its first position is that of the class."""
SQUARE_TOWERS = (_WITH_CLASS, "siglip_vision_model")


def check_square_tower(config: PretrainedConfig) -> str | None:
    """Why a configuration's tower is not of this kind, None where it is."""
    tower: Any = config.vision_config
    if tower.model_type not in SQUARE_TOWERS:
        return f"its tower is {tower.model_type}, and not one of {', '.join(SQUARE_TOWERS)}"
    if not isinstance(tower.image_size, int) or not isinstance(tower.patch_size, int):
        return "its tower takes images that are not square"
    return None


class SquareFamily(Family):
    """A checkpoint with such a tower."""

    @classmethod
    def unsupported(cls, config: PretrainedConfig) -> str | None:
        return check_square_tower(config)


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
