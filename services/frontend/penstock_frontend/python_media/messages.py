"""Parts of the messages that programs give: as OpenAI's protocol has them, and with media as they are."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from penstock_common.errors import InvalidArgument
from penstock_common.types.media import MODALITIES, Modality
from penstock_frontend.api.openai.conversation import PartBody
from penstock_frontend.api.openai.media_fields import MediaOptions, is_media, media_of
from penstock_frontend.call_types import ContentPart
from penstock_frontend.python_media.prompts import media_part

_OPTIONS = MediaOptions()
_PIL = "image_pil"
"""vLLM's type of a part with a PIL image."""


def contents_of(parts: Sequence[object], path: str) -> list[object]:
    """The parts, those with media as the domain's; what is none stays as it is, for others to refuse. Raises InvalidArgument,
    Unimplemented.
    """
    return [_part(part, f"{path}[{index}]") for index, part in enumerate(parts)]


def _part(part: object, path: str) -> object:
    if not isinstance(part, Mapping):
        return part
    kind: Any = part.get("type")
    if kind in (_PIL, *MODALITIES):
        if part.get(kind) is None:
            raise InvalidArgument(f"{path}.{kind} is not set", field=f"{path}.{kind}", reason="MISSING_FIELD")
        modality: Modality = "image" if kind == _PIL else kind
        return ContentPart(type="media", media=media_part(part[kind], modality, f"{path}.{kind}"))
    if not isinstance(kind, str) or not is_media(kind):
        return part
    try:
        body = msgspec.convert(part, PartBody)
    except msgspec.ValidationError as e:
        raise InvalidArgument(f"{path}: {e}", field=path) from None
    return ContentPart(type="media", media=media_of(kind, body, path, _OPTIONS))
