import base64
import math
from typing import Any

import msgspec
import pytest

from penstock_common.errors import InvalidArgument, RequestFailed, Unimplemented
from penstock_frontend.api.media_sources import MAX_FRAMES
from penstock_frontend.api.openai.body_fields import decode
from penstock_frontend.api.openai.chat_completions import ChatCompletionRequest
from penstock_frontend.api.openai.conversation import MediaIoBody, MediaOptions, VideoIoBody, messages_of, options_of
from penstock_frontend.call_types import ContentPart, Frame, Frames, MediaPart, Url

URL = "https://images.example.org/cat.png?sig=secret"
DATA = "data:image/png;base64,iVBORw0KGgo="
FRAMES = [base64.b64encode(bytes([255, 216, index])).decode() for index in range(3)]
VIDEO = "data:video/jpeg;base64," + ",".join(FRAMES)


def parsed(*parts: Any, options: MediaOptions = MediaOptions(), **fields: Any) -> list[ContentPart]:  # noqa: B008 - immutable
    """Return the content of the second message of a body."""
    turn = {"role": "user", "content": list(parts)}
    body = {"messages": [{"role": "system", "content": "look"}, turn], **fields}
    messages = messages_of(decode(msgspec.json.encode(body), ChatCompletionRequest).messages, options)
    content = messages[1].content
    assert isinstance(content, list)
    return content


def only(part: Any, options: MediaOptions = MediaOptions()) -> MediaPart:  # noqa: B008 - immutable
    (found,) = parsed(part, options=options)
    assert found.type == "media"
    assert found.media is not None
    return found.media


def test_text_and_media_keep_their_order() -> None:
    image = {"type": "image_url", "image_url": {"url": URL, "detail": "low"}}
    content = parsed({"type": "text", "text": "a"}, image, {"type": "text", "text": "b"})
    assert content == [
        ContentPart(type="text", text="a"),
        ContentPart(
            type="media",
            media=MediaPart(modality="image", source=Url(URL), field="messages[1].content[1].image_url.url"),
        ),
        ContentPart(type="text", text="b"),
    ]


@pytest.mark.parametrize(
    ("part", "modality", "source", "field"),
    [
        ({"type": "image_url", "image_url": {"url": DATA}}, "image", Url(DATA), "image_url.url"),
        ({"type": "image_url", "image_url": DATA}, "image", Url(DATA), "image_url"),
        ({"type": "image_url", "image_url": {"url": DATA, "detail": None}}, "image", Url(DATA), "image_url.url"),
        ({"type": "image_url", "image_url": {"url": DATA}, "uuid": None}, "image", Url(DATA), "image_url.url"),
        ({"type": "input_image", "image_url": DATA, "detail": "high"}, "image", Url(DATA), "image_url"),
        ({"type": "audio_url", "audio_url": {"url": URL}}, "audio", Url(URL), "audio_url.url"),
        (
            {"type": "input_audio", "input_audio": {"data": "UklGRg==", "format": "wav"}},
            "audio",
            Url("data:;base64,UklGRg==", unwritten=13),
            "input_audio.data",
        ),
        (
            {"type": "video_url", "video_url": {"url": VIDEO}},
            "video",
            Frames([Frame(bytes([255, 216, index]), float(index)) for index in range(3)]),
            "video_url.url",
        ),
    ],
)
def test_media_are_taken_as_openai_and_vllm_write_them(
    part: dict[str, Any], modality: Any, source: Any, field: str
) -> None:
    found = only(part)
    assert found == MediaPart(modality=modality, source=source, field=f"messages[1].content[0].{field}")


@pytest.mark.parametrize("detail", ["auto", "low", "high", "original"])
def test_a_known_detail_changes_nothing(detail: str) -> None:
    assert only({"type": "image_url", "image_url": {"url": DATA, "detail": detail}}).source == Url(DATA)


def test_options_of_the_body_are_those_of_every_medium() -> None:
    options = options_of({"min_pixels": 784}, MediaIoBody(video=VideoIoBody(fps=4.0)))
    found = only({"type": "video_url", "video_url": {"url": VIDEO}}, options)
    assert found.processor_kwargs == {"min_pixels": 784}
    assert isinstance(found.source, Frames)
    assert [frame.timestamp for frame in found.source.frames] == [0.0, 0.25, 0.5]


def test_what_a_part_is_of_is_kept_when_a_response_is() -> None:
    content = parsed({"type": "image_url", "image_url": {"url": DATA}}, {"type": "video_url", "video_url": VIDEO})
    kept = msgspec.json.encode(content)
    assert msgspec.json.decode(kept, type=list[ContentPart]) == content


@pytest.mark.parametrize(
    "name",
    [
        "WAV",
        " wav ",
        "wave",
        "audio/wav",
        "Audio/X-WAV",
        "audio/vnd.wave",
        "x-wav",
        "audio/mpeg",
        "mp3",
        "audio/ogg; codecs=opus",
    ],
)
def test_formats_of_sound_are_taken_by_every_name(name: str) -> None:
    sound = {"type": "input_audio", "input_audio": {"data": "UklGRg==", "format": name}}
    assert only(sound).source == Url("data:;base64,UklGRg==", unwritten=13)


def test_a_data_url_is_taken_as_data_of_a_sound() -> None:
    url = "data:audio/wav;base64,UklGRg=="
    assert only({"type": "input_audio", "input_audio": {"data": url, "format": "wav"}}).source == Url(url)


BROKEN: list[tuple[dict[str, Any], str, str]] = [
    # the part, the field inside the part, and the error message
    ({"type": "image_url"}, "image_url", "is not set"),
    ({"type": "image_url", "image_url": None}, "image_url", "is not set"),
    ({"type": "image_url", "audio_url": {"url": URL}}, "image_url", "is not set"),
    ({"type": "input_image"}, "image_url", "is not set"),
    ({"type": "audio_url"}, "audio_url", "is not set"),
    ({"type": "video_url"}, "video_url", "is not set"),
    ({"type": "input_audio"}, "input_audio", "is not set"),
    ({"type": "image_url", "image_url": ""}, "image_url", "is empty"),
    ({"type": "image_url", "image_url": {"url": ""}}, "image_url.url", "is empty"),
    ({"type": "audio_url", "audio_url": {"url": ""}}, "audio_url.url", "is empty"),
    ({"type": "video_url", "video_url": {"url": ""}}, "video_url.url", "is empty"),
    ({"type": "image_url", "image_url": {}}, "image_url.url", "is not set"),
    ({"type": "image_url", "image_url": {"url": 3}}, "image_url.url", "is an integer; it must be a string"),
    ({"type": "image_url", "image_url": {"url": None}}, "image_url.url", "is null; it must be a string"),
    ({"type": "image_url", "image_url": 3}, "image_url", "is an integer; it must be a string, an object or null"),
    ({"type": "image_url", "image_url": [URL]}, "image_url", "is a list; it must be "),
    ({"type": "image_url", "image_url": {"url": URL, "detail": 1}}, "image_url.detail", "is an integer; it must be "),
    ({"type": "image_url", "image_url": {"url": URL, "detail": "hi"}}, "image_url.detail", "known: auto, low, high"),
    ({"type": "input_image", "image_url": URL, "detail": "hi"}, "detail", "is 'hi'; known: auto, low, high, original"),
    ({"type": "input_image", "file_id": "file-1"}, "file_id", "is not supported: there are no files; use image_url"),
    (
        {"type": "image_url", "image_url": URL, "uuid": "a"},
        "uuid",
        "is not supported: media are known by their content",
    ),
    ({"type": "image_url", "uuid": "a"}, "uuid", "is not supported"),
    ({"type": "input_audio", "input_audio": {}}, "input_audio.data", "is not set"),
    ({"type": "input_audio", "input_audio": {"data": "UklG"}}, "input_audio.format", "is not set"),
    (
        {"type": "input_audio", "input_audio": {"data": 1, "format": "wav"}},
        "input_audio.data",
        "is an integer; it must be a string",
    ),
    ({"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}, "input_audio.data", "is empty"),
    (
        {"type": "input_audio", "input_audio": {"data": "UklG", "format": "pcm16"}},
        "input_audio.format",
        "is 'pcm16'; known: wav, mp3, flac, ogg, m4a, mp4, webm, aac",
    ),
    (
        {"type": "input_audio", "input_audio": {"data": "UklG", "format": "wav;base64,AAAA"}},
        "input_audio.format",
        "known: wav, mp3, flac, ogg, m4a, mp4, webm, aac",
    ),
    ({"type": "input_audio", "input_audio": "UklG"}, "input_audio", "is a string; it must be an object or null"),
    ({"type": "video_url", "video_url": URL}, "video_url", "this server reads no video files"),
    ({"type": "video_url", "video_url": "data:video/mp4;base64,AAAA"}, "video_url", "this server reads no video files"),
    ({"type": "video_url", "video_url": "data:video/jpeg,AAAA"}, "video_url", "this server reads no video files"),
    ({"type": "video_url", "video_url": "data:image/gif;base64,AAAA"}, "video_url", "this server reads no video files"),
    ({"type": "video_url", "video_url": "data:video/jpeg;base64,"}, "video_url", "frame 0 is empty"),
    ({"type": "video_url", "video_url": f"{VIDEO},"}, "video_url", "frame 3 is empty"),
    ({"type": "video_url", "video_url": f"{VIDEO},a"}, "video_url", "frame 3 has 1 base64 characters"),
    (
        {"type": "video_url", "video_url": f"{VIDEO},/9j/\u00e4"},
        "video_url",
        f"frame 3 has 'ä' at character {len(VIDEO) + 6}, which is not base64",
    ),
    (
        {"type": "video_url", "video_url": f"{VIDEO},/9*j"},
        "video_url",
        f"frame 3 has '*' at character {len(VIDEO) + 4}",
    ),
    (
        {"type": "image_embeds", "image_embeds": "gASV"},
        "type",
        "is not supported; gRPC's Media.embeds takes embeddings",
    ),
    (
        {"type": "audio_embeds", "audio_embeds": "gASV"},
        "type",
        "is not supported; gRPC's Media.embeds takes embeddings",
    ),
    ({"type": "video_embeds", "video_embeds": "gASV"}, "type", "is not supported"),
    ({"type": "image_pil", "image_pil": {}}, "type", "is not supported; use image_url"),
    ({"type": "file", "file": {"file_id": "f"}}, "type", "is not supported; use image_url"),
    ({"type": "input_file", "file_id": "f"}, "type", "is not supported; use input_image"),
]


@pytest.mark.parametrize(("part", "field", "message"), BROKEN)
def test_errors_of_a_part_name_its_field(part: dict[str, Any], field: str, message: str) -> None:
    with pytest.raises(RequestFailed) as raised:
        parsed({"type": "text", "text": "a"}, part)
    path = f"messages[1].content[1].{field}"
    assert isinstance(raised.value, (InvalidArgument, Unimplemented))
    assert raised.value.field == path
    assert raised.value.message.startswith(path)
    assert message in raised.value.message


@pytest.mark.parametrize("part", [part for part, _, _ in BROKEN])
def test_no_error_quotes_a_medium_or_a_url(part: dict[str, Any]) -> None:
    with pytest.raises(RequestFailed) as raised:
        parsed(part)
    for secret in ("secret", "example.org", "iVBOR", *FRAMES, "UklG", "gASV"):
        assert secret not in raised.value.message


def test_a_video_has_so_many_frames_at_most() -> None:
    most = "data:video/jpeg;base64," + ",".join(["AA=="] * MAX_FRAMES)
    found = only({"type": "video_url", "video_url": most})
    assert isinstance(found.source, Frames)
    assert len(found.source.frames) == MAX_FRAMES
    with pytest.raises(InvalidArgument, match=f"more than {MAX_FRAMES} frames") as raised:
        only({"type": "video_url", "video_url": f"{most},AA=="})
    assert raised.value.reason == "MEDIA_TOO_LARGE"


@pytest.mark.parametrize("fps", [0.0, -1.0, 1000.1, math.inf])
def test_pictures_a_second_have_a_range(fps: float) -> None:
    with pytest.raises(InvalidArgument, match=r"^media_io_kwargs\.video\.fps is ") as raised:
        options_of(None, MediaIoBody(video=VideoIoBody(fps=fps)))
    assert raised.value.field == "media_io_kwargs.video.fps"


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"mm_processor_kwargs": 3}, "mm_processor_kwargs"),
        ({"mm_processor_kwargs": ["a"]}, "mm_processor_kwargs"),
        ({"media_io_kwargs": {"image": {}}}, "media_io_kwargs.image"),
        ({"media_io_kwargs": {"video": {"num_frames": 3}}}, "media_io_kwargs.video.num_frames"),
        ({"media_io_kwargs": {"video": {"fps": "fast"}}}, "media_io_kwargs.video.fps"),
    ],
)
def test_options_of_another_form_are_refused(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidArgument) as raised:
        parsed(**fields)
    assert raised.value.field == field
