"""Media that Python programs in the same process pass in prompts and messages: PIL images, arrays, bytes and file
paths.
"""

import io
import itertools
import re
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from PIL import Image

from penstock_common.errors import LONGEST_PATH, InvalidArgument, Unimplemented, quoted
from penstock_common.types.media import MODALITIES, Modality
from penstock_frontend.api.media_sources import source_of_url
from penstock_frontend.api.openai.conversation import MediaOptions, PartBody, is_media, media_of
from penstock_frontend.call_types import ContentPart, EncodedFile, Frame, Frames, MediaPart, MixedPrompt, Source
from penstock_frontend.processing.media.families.base import Family
from penstock_frontend.processing.media.rgb import flattened
from penstock_frontend.processing.prompts.mixed_prompt import accepted
from penstock_frontend.processing.prompts.tokenizer import Tokenizer

_FORMS: Mapping[Modality, str] = {
    "image": "a PIL image, an array [height, width, 3] of uint8, a file's bytes, a Path or a URL",
    "audio": "a pair of samples (floats) and their rate, a file's bytes, a Path or a URL",
    "video": "frames at one per second (a list, or an array [frames, height, width, 3] of uint8), or a URL of frames",
}

_PNG_MODES = ("RGB", "RGBA", "L", "LA", "P", "1")
_WAV_FLOAT = 3
_MAX_RATE = 768_000


class UnplacedPrompt(MixedPrompt, frozen=True):
    """A prompt and its media, before each media item is put at its place in the prompt.

    The first part is the prompt, as text or token ids. The parts after the first part are the media. The n-th
    placeholder of a modality in the prompt stands for the n-th media item of this modality.
    """


def unplaced(prompt: str | Sequence[int], data: object, kwargs: object, name: str) -> UnplacedPrompt:
    """Return a prompt together with the media of ``multi_modal_data`` and the ``mm_processor_kwargs``. Raises
    InvalidArgument if an argument is not valid.
    """
    field = f"{name}.multi_modal_data"
    if not isinstance(data, Mapping):
        raise InvalidArgument(f'{field} is of type {type(data).__name__}; write e.g. {{"image": image}}', field=field)
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise InvalidArgument(f"{name}.mm_processor_kwargs is not a mapping", field=f"{name}.mm_processor_kwargs")
    media: list[MediaPart] = []
    for modality in data:
        if modality not in MODALITIES:
            known = ", ".join(MODALITIES)
            raise InvalidArgument(f"{field} has {quoted(modality)}; known: {known}", field=field)
        values = data[modality] if _are_several(data[modality], modality) else [data[modality]]
        media += [
            media_part(value, modality, f"{field}.{modality}[{index}]", kwargs) for index, value in enumerate(values)
        ]
    return UnplacedPrompt((prompt, *media), (name, *(part.field for part in media)))


def media_part(value: object, modality: Modality, field: str, kwargs: Mapping[str, Any] | None = None) -> MediaPart:
    """Return a media part that is made from a value of any supported Python type. Raises InvalidArgument for other
    types.
    """
    return MediaPart(
        modality=modality,
        source=_source(value, modality, field),
        field=field,
        processor_kwargs=dict(kwargs or {}),
    )


def placed(prompt: UnplacedPrompt, family: Family | None, tokenizer: Tokenizer, no_media: str = "") -> MixedPrompt:
    """Return the prompt with each media item in the place of its placeholder.

    ``family`` and ``no_media`` have the same meaning as in ``accepted``. Raises InvalidArgument if the number of media
    items differs from the number of placeholders.
    """
    given, *media = prompt.parts
    name = prompt.fields[0]
    queues: dict[Modality, list[MediaPart]] = {}
    for part in media:
        if isinstance(part, MediaPart):
            _check_taken(part, family, no_media)
            queues.setdefault(part.modality, []).append(part)
    tokens = {family.placeholder(modality): modality for modality in queues} if family is not None else {}
    pieces = _split_text(given, tokens) if isinstance(given, str) else _split_ids(given, tokens, tokenizer)
    for token, modality in tokens.items():
        count, found = len(queues[modality]), sum(piece == modality for piece, is_place in pieces if is_place)
        if count != found:
            raise InvalidArgument(
                f"{name} has {count} {modality} items but {found} placeholders; write {token} at the place of each item",
                field=name,
            )
    parts = [queues[piece].pop(0) if is_place else piece for piece, is_place in pieces]
    return MixedPrompt(tuple(parts), tuple(part.field if isinstance(part, MediaPart) else name for part in parts))


def _check_taken(part: MediaPart, family: Family | None, no_media: str) -> None:
    if family is None or part.modality not in family.modalities:
        raise InvalidArgument(f"{part.field} is set; {accepted(family, no_media)}", field=part.field)


_Pieces = list[tuple[Any, bool]]
"""Prompt that was split at its placeholders. An item is a non-empty text, a list of token ids, or, if the flag is True,
the modality of a placeholder.
"""


def _split_text(text: str, tokens: Mapping[str, Modality]) -> _Pieces:
    if not tokens:
        return [(text, False)]
    found = re.split("(" + "|".join(map(re.escape, sorted(tokens, key=len, reverse=True))) + ")", text)
    return [(tokens[piece], True) if index % 2 else (piece, False) for index, piece in enumerate(found) if piece]


def _split_ids(ids: Any, tokens: Mapping[str, Modality], tokenizer: Tokenizer) -> _Pieces:
    places = {tokenizer.token_id(token): modality for token, modality in tokens.items()}
    pieces: _Pieces = []
    for is_place, group in itertools.groupby(ids, key=places.__contains__):
        if is_place:
            pieces += [(places[token_id], True) for token_id in group]
        else:
            pieces.append((list(group), False))
    return pieces


def _are_several(value: object, modality: str) -> bool:
    """Return True if a value is a list of several media items.

    A list of images counts as one video. A pair of samples and sample rate counts as one audio item.
    """
    if not isinstance(value, list):
        return False
    return modality != "video" or not value or isinstance(value[0], (list, np.ndarray, str, Frames))


def _source(value: object, modality: Modality, field: str) -> Source:
    if isinstance(value, str):
        return source_of_url(modality, value, field=field)
    if isinstance(value, (bytes, bytearray, Path)):
        if modality == "video":
            raise Unimplemented(f"{field} is a video file, which is not supported; pass its frames", field=field)
        return EncodedFile(_read(value, field) if isinstance(value, Path) else bytes(value))
    if modality == "image" and (picture := _picture(value)) is not None:
        return EncodedFile(picture)
    if modality == "audio" and isinstance(value, tuple) and len(value) == 2:
        return EncodedFile(_sound(*value, field=field))
    if modality == "video" and isinstance(value, (list, tuple, np.ndarray)):
        pictures = [_picture(each) for each in value]
        if pictures and None not in pictures:
            return Frames([Frame(each, float(index)) for index, each in enumerate(pictures) if each is not None])
    raise InvalidArgument(f"{field} is of type {type(value).__name__}; it must be {_FORMS[modality]}", field=field)


def _read(path: Path, field: str) -> bytes:
    try:
        return path.expanduser().read_bytes()
    except OSError as e:
        raise InvalidArgument(
            f"{field}: cannot read {quoted(str(path), LONGEST_PATH)}: {e.strerror or e}", field=field
        ) from None


def _picture(value: object) -> bytes | None:
    """Return an image as the bytes of a PNG file. Return None if the value is not an image.

    An image with a mode that PNG does not support is converted to RGB.
    """
    if isinstance(value, np.ndarray):
        if value.dtype != np.uint8 or value.ndim != 3 or value.shape[2] not in (3, 4) or not value.size:
            return None
        value = Image.fromarray(value)
    if not isinstance(value, Image.Image):
        return None
    file = io.BytesIO()
    (value if value.mode in _PNG_MODES else flattened(value)).save(file, "PNG", compress_level=1)
    return file.getvalue()


def _sound(samples: object, rate: object, *, field: str) -> bytes:
    """Return audio samples as the bytes of a WAV file with float samples. ``samples`` has the shape ``[samples]`` or
    ``[samples, channels]``.
    """
    array = np.asarray(samples)
    if array.ndim not in (1, 2) or not np.issubdtype(array.dtype, np.floating) or not array.size:
        raise InvalidArgument(
            f"{field}: the audio samples must be floats of shape [samples] or [samples, channels]", field=field
        )
    if not isinstance(rate, int) or not 1 <= rate <= _MAX_RATE:
        raise InvalidArgument(
            f"{field}: the sample rate is {quoted(rate)}; it must be from 1 to {_MAX_RATE} Hz", field=field
        )
    data = np.ascontiguousarray(array, dtype="<f4").tobytes()
    width = 4 * (array.shape[1] if array.ndim == 2 else 1)
    form = struct.pack("<HHIIHH", _WAV_FLOAT, width // 4, rate, rate * width, width, 32)
    chunks = b"fmt " + struct.pack("<I", len(form)) + form + b"data" + struct.pack("<I", len(data)) + data
    return b"RIFF" + struct.pack("<I", 4 + len(chunks)) + b"WAVE" + chunks


_OPTIONS = MediaOptions()
_PIL = "image_pil"
"""Type of a message part that has a PIL image, as in vLLM."""


def contents_of(parts: Sequence[object], path: str) -> list[object]:
    """Convert the parts of a message that have media to ``ContentPart`` objects.

    Other parts stay unchanged, and later code checks them.

    Raises InvalidArgument and Unimplemented.
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
