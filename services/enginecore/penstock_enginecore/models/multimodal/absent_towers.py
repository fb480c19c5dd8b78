"""Stand-ins for vision encoders that transformers takes from the package timm, if timm is not installed.

transformers creates the encoders of a multimodal checkpoint even if Penstock serves only the text model and removes the
encoders again. With stand-ins, this does not need timm.
"""

from typing import Any

from transformers import AutoModel, Gemma3nVisionConfig, PretrainedConfig, PreTrainedModel, TimmWrapperConfig
from transformers.utils.import_utils import is_timm_available


def _stand_in(config: type[PretrainedConfig]) -> type[PreTrainedModel]:
    """Return a model class for ``config`` that has no modules and no weights."""

    def init(self: Any, config: PretrainedConfig) -> None:
        PreTrainedModel.__init__(self, config)
        self.post_init()

    members = {"__init__": init, "__module__": __name__, "config_class": config}
    return type("AbsentTower", (PreTrainedModel,), members)


def register() -> None:
    """Register stand-ins with transformers if timm is not installed. Idempotent."""
    if is_timm_available():
        return
    for config in (Gemma3nVisionConfig, TimmWrapperConfig):
        AutoModel.register(config, _stand_in(config), exist_ok=True)
