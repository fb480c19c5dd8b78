"""What a client expects an answer to be, as OpenAI writes it."""

from collections.abc import Mapping

import msgspec

from penstock_common.errors import InvalidArgument, Unimplemented, quoted

NAMES: Mapping[str, str] = {"prediction.text": "prediction.content"}
"""Our names of its fields to the client's."""


class PredictionPart(msgspec.Struct, frozen=True):
    """A part of it, which must be text."""

    type: str
    text: str = ""


class PredictionBody(msgspec.Struct, frozen=True):
    """``{"type": "content", "content": text}``; parts are put together as they are."""

    type: str
    content: str | list[PredictionPart]


def text_of(prediction: PredictionBody | None) -> str | None:
    """The text, None without a prediction. Raises InvalidArgument for another type, Unimplemented for a part that is no text."""
    if prediction is None:
        return None
    if prediction.type != "content":
        raise InvalidArgument(
            f"prediction.type is {quoted(prediction.type)}; it must be 'content'", field="prediction.type"
        )
    if isinstance(prediction.content, str):
        return prediction.content
    for index, part in enumerate(prediction.content):
        if part.type != "text":
            field = f"prediction.content[{index}].type"
            raise Unimplemented(f"{field} is {quoted(part.type)}; only 'text' is served", field=field)
    return "".join(part.text for part in prediction.content)
