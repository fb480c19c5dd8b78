"""Requests with media whose outputs are known."""

import pytest

from penstock.inference.v1 import messages_pb2 as pb
from tests.chaos.media import media_ones, salted


@pytest.mark.parametrize(("family", "modalities"), [("qwen2_audio", {"audio"}), ("qwen2_vl", {"image", "video"})])
def test_a_family_is_asked_for_what_it_takes(family: str, modalities: set[str]) -> None:
    mixed = [request.message.mixed for request in media_ones(family, 24, 8) if request.way == "Generate"]
    found = {part.media.modality for prompt in mixed for part in prompt.parts if part.HasField("media")}
    assert found == modalities


def test_requests_are_the_same_each_time_and_media_come_again() -> None:
    requests = media_ones("llava", 48, 8)
    assert requests == media_ones("llava", 48, 8)
    media = [
        part.media.data
        for request in requests
        if request.way == "Generate"
        for part in request.message.mixed.parts
        if part.HasField("media")
    ]
    assert len(set(media)) < len(media)


def test_a_salt_is_all_that_changes() -> None:
    for request in media_ones("llava", 8, 8):
        other = salted(request, "x")
        if isinstance(request.message, dict):
            assert other.message == request.message | {"cache_salt": "x"}
            continue
        assert other.message.cache_salt == "x"
        other.message.ClearField("cache_salt")
        assert other.message == request.message


def test_what_takes_no_salt_stays_as_it_is() -> None:
    request = media_ones("llava", 1, 8)[0]
    embed = type(request)("embed", "Embed", pb.EmbedRequest())
    assert salted(embed, "x").message == embed.message
