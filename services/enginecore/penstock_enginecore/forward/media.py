"""What steps of a model with towers have besides tokens and embeddings."""

from dataclasses import dataclass
from typing import Any

from penstock_enginecore.models.errors import ModelLoadError
from penstock_enginecore.models.loader import LoadedModel


@dataclass(frozen=True, slots=True)
class MediaDemands:
    """Of a model's steps. ``sections``: some have ``rope_positions``. ``num_deepstack``: layers of their ``deepstack``, 0 for
    none. ``spans``: some have ``key_ends``. See ``ForwardBatch`` and ``AttentionMetadata``.
    """

    sections: bool = False
    num_deepstack: int = 0
    spans: bool = False

    def __bool__(self) -> bool:
        return self.sections or self.num_deepstack > 0 or self.spans

    def __str__(self) -> str:
        """For errors that say what is not served."""
        named = {
            "positions in sections": self.sections,
            "rows that are added behind its first layers": self.num_deepstack > 0,
            "images that attend both ways": self.spans,
        }
        return " and ".join(name for name, is_so in named.items() if is_so)


NO_DEMANDS = MediaDemands()


def demands_of(model: LoadedModel) -> MediaDemands:
    """Those of its towers. Raises ModelLoadError where its modules would take them for something else."""
    encoder = model.encoder
    if encoder is None:
        return NO_DEMANDS
    spans = any(info.attends_both_ways for info in encoder.media)
    demands = MediaDemands(encoder.rope_positions is not None, encoder.num_deepstack, spans)
    base: Any = model.module.base_model
    if demands.sections and not any(hasattr(module, "mrope_section") for module in base.modules()):
        raise ModelLoadError(f"{type(base).__name__} is not served with media: its rotary embedding has no sections")
    if demands.num_deepstack and not hasattr(base, "_deepstack_process"):
        raise ModelLoadError(f"{type(base).__name__} is not served with media: nothing is added behind its layers")
    return demands
