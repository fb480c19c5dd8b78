"""What clients are told that requests may have of media."""

from penstock_common.types.media import MediaLimits
from penstock_frontend.calls.generate import AsyncLLM
from penstock_frontend.config import LimitsConfig


def media_limits(llm: AsyncLLM, limits: LimitsConfig) -> list[MediaLimits]:
    """Of each modality that model, frontend and engines take; the lower limit counts. Empty while no engine is up."""
    engines, media = llm.engines.view.limits, llm.inputs.media
    if engines is None or media is None:
        return []
    found = []
    for each in engines.media:
        items = min(each.max_items, limits.max_media.of(each.modality))
        if items and each.modality in media.preparer.family.modalities:
            found.append(MediaLimits(modality=each.modality, max_items=items, max_tokens=each.max_tokens))
    return found
