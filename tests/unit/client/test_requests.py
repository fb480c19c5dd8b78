"""Requests with images, sound and video, as the Python client builds them."""

from pathlib import Path

import pytest

from penstock.common.v1.stats_pb2 import Usage as UsageMessage
from penstock_client import Media, audio, image, message, video
from penstock_client.requests import generate_request, pooling_input
from penstock_client.results import read_usage

PNG = b"\x89PNG"


def test_media_are_bytes_files_and_urls(tmp_path: Path) -> None:
    file = tmp_path / "a.png"
    file.write_bytes(PNG)
    assert image(PNG) == image(file) == Media(modality="image", data=PNG)
    assert image("https://a/b") == Media(modality="image", url="https://a/b")
    assert audio(b"RIFF", processor_kwargs="{}") == Media(modality="audio", data=b"RIFF", processor_kwargs="{}")


def test_a_video_has_pictures_and_their_times() -> None:
    assert [frame.timestamp for frame in video([PNG, PNG, PNG], fps=2).frames.frames] == [0.0, 0.5, 1.0]
    assert [frame.timestamp for frame in video([PNG], timestamps=[3.5]).frames.frames] == [3.5]
    with pytest.raises(ValueError, match="timestamps has 2 entries, but there are 1 frames"):
        video([PNG], timestamps=[0.0, 1.0])


def test_a_message_has_texts_and_media_in_order() -> None:
    turn = message("user", image(PNG), "what is it?")
    assert turn.role == "user"
    assert [part.WhichOneof("part") for part in turn.parts] == ["media", "text"]
    assert not turn.content


def test_prompts_and_inputs_may_be_mixed() -> None:
    request = generate_request(["a", image(PNG), [1, 2]], None, None, {"lora": "l"})
    assert [part.WhichOneof("part") for part in request.mixed.parts] == ["text", "media", "token_ids"]
    assert request.lora == "l"
    assert list(generate_request([1, 2], None, None, {}).token_ids.ids) == [1, 2]
    assert generate_request([], None, None, {}).WhichOneof("prompt") == "token_ids"
    text, ids, mixed = map(pooling_input, ("a", [1], [image(PNG)]))
    assert (text.text, list(ids.token_ids.ids), mixed.WhichOneof("input")) == ("a", [1], "mixed")


def test_counts_say_what_media_stand_at() -> None:
    assert read_usage(UsageMessage(prompt_tokens=5, media_tokens={"image": 3})).media_tokens == {"image": 3}
