"""Media as callers of an ``LLM`` give them."""

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from penstock_common.errors import ConfigError, InvalidArgument, RequestFailed, Unimplemented
from penstock_frontend.call_types import EncodedFile, Frames, MediaPart, MixedPrompt, Url
from penstock_frontend.in_process_media import UnplacedPrompt, placed
from penstock_frontend.processing.media.decode import decode_image, open_image
from penstock_frontend.processing.media.worker_messages import DecodeLimits
from penstock_local import LLM
from penstock_local.llm.inputs import Requests, conversations_of, predicted_of, prompts_of
from penstock_local.llm.options import engine_config, media_config, media_limits
from tests.fakes.media_files import image_file, sound_file

PIXELS = np.random.default_rng(0).integers(0, 255, (6, 8, 3), dtype=np.uint8)
PICTURE = Image.fromarray(PIXELS)
URL = "https://example.org/a.png"


class FakeFamily:
    """A media family in which each image or sound is one token."""

    modalities = frozenset({"image", "audio"})

    def placeholder(self, modality: str) -> str:
        return f"<{modality}>"


class FakeTokenizer:
    def token_id(self, text: str) -> int | None:
        return {"<image>": 9, "<audio>": 8}[text]


def one(prompt: Any) -> UnplacedPrompt:
    (found,) = prompts_of(prompt, name="prompts").each
    if isinstance(found, RequestFailed):
        raise found
    assert isinstance(found, UnplacedPrompt)
    return found


def parts_of(prompt: Any) -> list[Any]:
    """Return the prompt's parts, with modalities in place of media."""
    given = placed(one(prompt), FakeFamily(), FakeTokenizer())  # type: ignore[arg-type]
    return [part.modality if isinstance(part, MediaPart) else part for part in given.parts]


def source_of(modality: str, value: Any) -> Any:
    (_, part) = one({"prompt": "a", "multi_modal_data": {modality: value}}).parts
    assert isinstance(part, MediaPart)
    return part.source


def pixels_of(data: bytes) -> Any:
    with Image.open(io.BytesIO(data)) as image:
        return np.asarray(image)


def shown_of(image: Image.Image) -> list[int]:
    """Return the grey level of each pixel that the model sees."""
    limits = DecodeLimits(max_pixels=10, max_frames=1, max_audio_seconds=1.0)
    shown = np.asarray(decode_image(open_image(source_of("image", image).data, limits)))
    assert (shown == shown[..., :1]).all()
    return [int(grey) for grey in shown[0, :, 0]]


@pytest.mark.parametrize("value", [PICTURE, PIXELS], ids=["PIL", "array"])
def test_an_image_loses_nothing(value: Any) -> None:
    source = source_of("image", value)
    assert isinstance(source, EncodedFile)
    assert np.array_equal(pixels_of(source.data), PIXELS)


@pytest.mark.parametrize("mode", ["L", "RGBA", "P", "CMYK", "I;16", "1"])
def test_an_image_may_have_any_mode(mode: str) -> None:
    image = Image.new(mode, (3, 2))
    assert pixels_of(source_of("image", image).data).shape[:2] == (2, 3)


@pytest.mark.parametrize("mode", ["RGBA", "RGBa", "LA", "La", "PA", "P", "palette with alpha"])
def test_transparent_pixels_of_an_image_are_white(mode: str) -> None:
    image = Image.fromarray(np.array([[[9, 9, 9, 0], [9, 9, 9, 255], [0, 0, 0, 51]]], np.uint8), "RGBA")
    if mode == "P":
        image = Image.frombytes("P", (3, 1), b"\0\1\2")
        image.putpalette([9, 9, 9, 9, 9, 9, 204, 204, 204])
        image.info["transparency"] = 0
    elif mode == "palette with alpha":
        image = Image.frombytes("P", (3, 1), b"\0\1\2")
        image.putpalette([9, 9, 9, 0, 9, 9, 9, 255, 0, 0, 0, 51], "RGBA")
    else:
        image = image.convert("LA").convert(mode) if mode == "La" else image.convert(mode)
    assert shown_of(image) == [255, 9, 204]


@pytest.mark.parametrize(("mode", "kind"), [("I;16", "<u2"), ("I;16B", ">u2"), ("I;16L", "<u2"), ("I", "=i4")])
def test_16_bits_of_grey_are_scaled(mode: str, kind: str) -> None:
    image = Image.frombytes(mode, (3, 1), np.array([0x0700, 0x1234, 65_535], kind).tobytes())
    assert shown_of(image) == [7, 0x12, 255]


def test_files_and_urls_go_as_they_are(tmp_path: Path) -> None:
    file = tmp_path / "a.png"
    file.write_bytes(image_file())
    assert source_of("image", file) == EncodedFile(image_file())
    assert source_of("image", image_file()) == EncodedFile(image_file())
    assert source_of("image", URL) == Url(URL)
    assert source_of("audio", sound_file()) == EncodedFile(sound_file())


@pytest.mark.parametrize("shape", [(100,), (100, 2)])
def test_samples_become_a_sound_of_their_rate(shape: tuple[int, ...]) -> None:
    import soundfile

    samples = np.random.default_rng(0).uniform(-1, 1, shape).astype(np.float32)
    read, rate = soundfile.read(io.BytesIO(source_of("audio", (samples, 8000)).data), dtype="float32")
    assert rate == 8000
    assert np.array_equal(read, samples)


def test_pictures_become_a_video_of_one_a_second() -> None:
    for value in ([PICTURE, PICTURE], np.stack([PIXELS, PIXELS])):
        source = source_of("video", value)
        assert isinstance(source, Frames)
        assert [frame.timestamp for frame in source.frames] == [0.0, 1.0]
        assert np.array_equal(pixels_of(source.frames[0].data), PIXELS)


@pytest.mark.parametrize(
    ("prompt", "parts"),
    [
        ({"prompt": "a <image> b", "multi_modal_data": {"image": PICTURE}}, ["a ", "image", " b"]),
        ({"prompt": "<image><image>", "multi_modal_data": {"image": [PICTURE, URL]}}, ["image", "image"]),
        (
            {"prompt": "x<audio>y<image>", "multi_modal_data": {"image": [URL], "audio": URL}},
            ["x", "audio", "y", "image"],
        ),
        ({"prompt_token_ids": [1, 9, 2], "multi_modal_data": {"image": URL}}, [[1], "image", [2]]),
        ({"prompt_token_ids": [9, 9], "multi_modal_data": {"image": [URL, URL]}}, ["image", "image"]),
        ({"prompt": "a", "multi_modal_data": {}}, ["a"]),
    ],
)
def test_media_stand_where_the_models_tokens_are(prompt: Any, parts: list[Any]) -> None:
    assert parts_of(prompt) == parts


def test_media_keep_their_order_and_their_arguments() -> None:
    data = {"image": [URL, PICTURE]}
    prompt = one({"prompt": "<image><image>", "multi_modal_data": data, "mm_processor_kwargs": {"min_pixels": 3}})
    first, second = placed(prompt, FakeFamily(), FakeTokenizer()).media  # type: ignore[arg-type]
    assert first.source == Url(URL)
    assert isinstance(second.source, EncodedFile)
    assert second.processor_kwargs == {"min_pixels": 3}
    assert (first.field, second.field) == (
        "prompts.multi_modal_data.image[0]",
        "prompts.multi_modal_data.image[1]",
    )


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        (
            {"prompt": "a", "multi_modal_data": {"image": URL}},
            "prompts has 1 image items but 0 placeholders; write <image>",
        ),
        ({"prompt": "<image><image>", "multi_modal_data": {"image": URL}}, "has 1 image items but 2 placeholders"),
        ({"prompt": "<image>", "multi_modal_data": {"image": []}}, ""),
        ({"prompt": "a", "multi_modal_data": {"video": [PICTURE]}}, "this model accepts text, audio, image"),
        ({"prompt": "a", "multi_modal_data": [PICTURE]}, "prompts.multi_modal_data is of type list"),
        ({"prompt": "a", "multi_modal_data": {"smell": 1}}, "has 'smell'; known: image, audio, video"),
        ({"prompt": "a", "multi_modal_data": {"image": None}}, "is of type NoneType; it must be a PIL image"),
        ({"prompt": "a", "multi_modal_data": {"image": np.zeros((2, 2, 3))}}, "is of type ndarray; it must be a PIL"),
        ({"prompt": "a", "multi_modal_data": {"image": Path("/none")}}, "cannot read '/none': No such file"),
        ({"prompt": "a", "multi_modal_data": {"image": ""}}, "multi_modal_data.image[0] is empty"),
        (
            {"prompt": "a", "multi_modal_data": {"audio": np.zeros(3)}},
            "it must be a pair of samples (floats) and their",
        ),
        (
            {"prompt": "a", "multi_modal_data": {"audio": (np.zeros(3), 0)}},
            "the sample rate is 0; it must be from 1 to",
        ),
        ({"prompt": "a", "multi_modal_data": {"audio": (np.zeros(3, int), 9)}}, "the audio samples must be floats"),
        ({"prompt": "a", "multi_modal_data": {"video": b"mp4"}}, "is a video file, which is not supported"),
        ({"prompt": "a", "multi_modal_data": {"video": [1]}}, "is of type list; it must be frames"),
        ({"prompt": "a", "multi_modal_data": {"image": URL}, "mm_processor_kwargs": 3}, "is not a mapping"),
        ({"multi_modal_data": {"image": URL}}, "it must have only prompt or prompt_token_ids"),
        ({"prompt": "a", "mm_processor_kwargs": {}}, "it must have only prompt or prompt_token_ids"),
    ],
)
def test_what_is_wrong_with_media_is_said(prompt: Any, said: str) -> None:
    if not said:
        assert parts_of(prompt) == ["<image>"]
        return
    with pytest.raises((InvalidArgument, Unimplemented)) as raised:
        parts_of(prompt)
    assert said in raised.value.message


def test_a_model_that_reads_text_takes_no_media() -> None:
    prompt = one({"prompt": "<image>", "multi_modal_data": {"image": URL}})
    with pytest.raises(InvalidArgument, match="this model accepts text"):
        placed(prompt, None, FakeTokenizer())  # type: ignore[arg-type]


def test_conversations_have_parts_with_media() -> None:
    content = [
        {"type": "text", "text": "a"},
        {"type": "image", "image": PICTURE},
        {"type": "image_pil", "image_pil": PICTURE},
        {"type": "image_url", "image_url": {"url": URL}},
    ]
    (messages,) = conversations_of([{"role": "user", "content": content}]).each
    assert not isinstance(messages, RequestFailed)
    parts = messages[0].content
    assert isinstance(parts, list)
    assert [part.type for part in parts] == ["text", "media", "media", "media"]
    fields = [part.media.field for part in parts if part.media is not None]
    assert fields == [
        "messages[0].content[1].image",
        "messages[0].content[2].image_pil",
        "messages[0].content[3].image_url.url",
    ]


@pytest.mark.parametrize(
    ("part", "said"),
    [
        ({"type": "image"}, "messages[0].content[0].image is not set"),
        ({"type": "image", "image": 3}, "messages[0].content[0].image is of type int"),
        ({"type": "image_url"}, "messages[0].content[0].image_url is not set"),
        ({"type": "image_url", "image_url": 3}, "messages[0].content[0]: "),
        ({"type": "image_embeds", "image_embeds": "x"}, "messages[0].content[0].type is 'image_embeds'"),
        (3, "conversations[0].messages[0]: "),
    ],
)
def test_what_is_wrong_with_a_part_is_said(part: Any, said: str) -> None:
    (found,) = conversations_of([[{"role": "user", "content": [part]}]]).each
    assert isinstance(found, RequestFailed)
    assert said in found.message


def test_scores_and_predictions_are_of_texts() -> None:
    prompt: dict[str, Any] = {"prompt": "<image>", "multi_modal_data": {"image": URL}}
    for make in _SCORES:
        (found,) = make(prompt)
        assert isinstance(found, Unimplemented)
        assert found.field.endswith(".multi_modal_data")
    (predicted,) = predicted_of(prompt | {"prediction": "b"}, name="prompts").each
    assert not isinstance(predicted, RequestFailed)
    assert isinstance(predicted.prompt, MixedPrompt)
    assert predicted.prediction == "b"


_SCORES: list[Callable[[Any], Any]] = [
    lambda prompt: Requests(None).score([prompt], ["a"]).each,
    lambda prompt: Requests(None).score(["a"], [prompt]).each,
]


def test_options_of_media_are_checked() -> None:
    assert media_config(["a.org"], 2).allowed_domains == ("a.org",)
    assert media_limits({"image": 3}).max_media.image == 3
    assert engine_config("m", {"media": False}).multimodal.enabled is False
    assert engine_config("m", {}).multimodal.enabled is True
    assert media_limits(None).max_media.image > 0
    for wrong in (lambda: media_config("a.org", 1), lambda: media_config([], -1), lambda: media_limits({"smell": 1})):
        with pytest.raises(ConfigError):
            wrong()
    with pytest.raises(ConfigError, match="limit_mm_per_prompt is 3"):
        media_limits(3)


@pytest.mark.parametrize(
    "given",
    [{"limit_mm_per_prompt": {"image": 1}}, {"allowed_media_domains": ["a.org"]}],
    ids=lambda given: next(iter(given)),
)
def test_arguments_of_media_have_no_effect_without_media(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(given))} has no effect with media=False"):
        LLM("never/read", media=False, **given)
