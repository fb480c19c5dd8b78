"""Images as Anthropic's protocol writes them, to the domain's media."""

from penstock_common.errors import InvalidArgument, Unimplemented, quoted
from penstock_frontend.api.anthropic.messages_body import SourceBody
from penstock_frontend.api.media_sources import source_of_base64, source_of_url
from penstock_frontend.media_parts import MediaPart

_TYPES = ("image/jpeg", "image/png", "image/gif", "image/webp")


def image_of(source: SourceBody | None, path: str, place: str) -> MediaPart:
    """The image of a source, which stands at ``place`` in the turn of that path; its field is relative to the turn. Raises
    InvalidArgument, and Unimplemented for files.
    """
    where = f"{path}.{place}"
    if source is None:
        raise InvalidArgument(f"{where} is not set", field=where, reason="MISSING_FIELD")
    match source.type:
        case "base64":
            if source.media_type not in _TYPES:
                field = f"{where}.media_type"
                raise InvalidArgument(
                    f"{field} is {quoted(source.media_type)}; known: {', '.join(_TYPES)}", field=field
                )
            if not source.data:
                raise InvalidArgument(f"{where}.data is not set", field=f"{where}.data", reason="MISSING_FIELD")
            name, found = "data", source_of_base64(source.data)
        case "url":
            if not source.url:
                raise InvalidArgument(f"{where}.url is not set", field=f"{where}.url", reason="MISSING_FIELD")
            name, found = "url", source_of_url("image", source.url, field=f"{where}.url")
        case kind:
            field = f"{where}.type"
            raise Unimplemented(f"{field} is {quoted(kind)}; known: base64, url", field=field)
    return MediaPart(modality="image", source=found, field=f"{place}.{name}")
