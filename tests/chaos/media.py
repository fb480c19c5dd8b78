"""Requests with images, audio and video. Their outputs are the same each time."""

import base64
import io
from collections.abc import Callable
from typing import Any

import soundfile

from penstock.admin.v1 import messages_pb2 as admin_pb
from penstock.admin.v1 import service_pb2_grpc as admin_rpc
from penstock.common.v1.media_pb2 import Media, MediaFrame, MediaFrames
from penstock.common.v1.sampling_pb2 import SamplingParams
from penstock.inference.v1 import messages_pb2 as pb
from penstock_common.rpc.channel import make_channel
from tests.chaos.requests import Request, Way
from tests.fakes.multimodal_models import AUDIO_FAMILIES, make_image, make_sound

DIFFERENT = 24
"""Number of different items per modality. Several requests use the same item."""
VIDEO_FAMILIES = ("qwen2_vl", "qwen2_5_vl")
BROKEN = Media(modality="image", data=b"\x89PNG\r\n\x1a\n and nothing behind it")
BROKEN_SOUND = Media(modality="audio", data=b"RIFF\x04\0\0\0WAVEand nothing behind it")


def image(number: int) -> Media:
    """Return a PNG file with sides of 60 to 290 pixels."""
    number %= DIFFERENT
    return Media(modality="image", data=_png(60 + 10 * number, 290 - 9 * number, number))


def video(number: int) -> Media:
    """Return a video of four frames in two seconds."""
    number %= DIFFERENT
    frames = [
        MediaFrame(data=_png(48, 32 + 8 * (number % 4), 100 * number + at), timestamp=at / 2.0) for at in range(4)
    ]
    return Media(modality="video", frames=MediaFrames(frames=frames))


def sound(number: int) -> Media:
    """Return a WAV file of 0.5 to 3 seconds."""
    number %= DIFFERENT
    file = io.BytesIO()
    soundfile.write(file, make_sound(0.5 + 0.1 * number, seed=number), 16_000, format="WAV")
    return Media(modality="audio", data=file.getvalue())


def _png(width: int, height: int, seed: int) -> bytes:
    file = io.BytesIO()
    make_image(width, height, seed=seed).save(file, "PNG")
    return file.getvalue()


def media_ones(family: str, count: int, tokens: int) -> list[Request]:
    """Return ``count`` requests of all shapes for a model of ``tests.fakes.multimodal_models``.

    Each request asks for 0.5 to 1.5 times ``tokens`` output tokens. The frontend refuses some of the requests.
    """
    makers = _shapes("sound", sound, BROKEN_SOUND) if family in AUDIO_FAMILIES else _shapes("image", image, BROKEN)
    if family in VIDEO_FAMILIES:
        makers += _shapes("video", video, BROKEN)[:4]
    return [makers[i % len(makers)](i, tokens * (4 + i % 9) // 8) for i in range(count)]


def _shapes(name: str, item: Callable[[int], Media], broken: Media) -> list[Callable[[int, int], Request]]:
    """Return functions that create a request from a number and a length."""
    return [
        lambda i, t: _generate(f"{name}, greedy", i, t, [item(i)], temperature=0.0),
        lambda i, t: _chat(f"{name}, chat", i, t, [item(i)]),
        lambda i, t: _generate(f"{name}, sampled, n=2", i, t // 2, [item(i)], n=2),
        lambda i, t: _generate(f"two of {name}, session", i, t, [item(i), item(i + 1)], way="GenerateSession"),
        lambda i, t: _over_http(f"{name}, HTTP chat", i, t, [item(i)]),
        lambda i, t: _generate(f"three of {name}, one of them twice", i, t, [item(i), item(i + 5), item(i)]),
        lambda i, t: _generate(f"{name}, logprobs", i, t, [item(i)], logprobs=2),
        lambda i, t: _chat(f"refused: broken {name}", i, t, [item(i), broken]),
    ]


def _sampling(number: int, tokens: int, **fields: Any) -> SamplingParams:
    chosen = {"temperature": 1.0, "seed": number, "max_tokens": max(1, tokens), "ignore_eos": True} | fields
    return SamplingParams(**chosen)


def _generate(
    kind: str, number: int, tokens: int, items: list[Media], *, way: Way = "Generate", **sampling: Any
) -> Request:
    """Return a request with text before, between and after the items."""
    parts = [pb.PromptPart(text=f"Once, {number % 7} of them: ")]
    for item in items:
        parts += [pb.PromptPart(media=item), pb.PromptPart(text=" and then ")]
    params = _sampling(number, tokens, **sampling)
    return Request(kind, way, pb.GenerateRequest(mixed=pb.MixedPrompt(parts=parts), sampling_params=params))


def _chat(kind: str, number: int, tokens: int, items: list[Media]) -> Request:
    parts = [*(pb.ContentPart(media=item) for item in items), pb.ContentPart(text=f"What is it, for {number % 5}?")]
    message = pb.ChatMessage(role="user", parts=parts)
    return Request(kind, "Chat", pb.ChatRequest(messages=[message], sampling_params=_sampling(number, tokens)))


def _over_http(kind: str, number: int, tokens: int, items: list[Media]) -> Request:
    content = [*map(_content, items), {"type": "text", "text": f"What is it, for {number % 5}?"}]
    body = {
        "messages": [{"role": "user", "content": content}],
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
        "seed": number,
        "max_tokens": max(1, tokens),
        "ignore_eos": True,
    }
    return Request(kind, "/v1/chat/completions", body)


def _content(item: Media) -> dict[str, Any]:
    """Return a content part in the format of OpenAI's API."""
    if item.modality == "audio":
        return {"type": "input_audio", "input_audio": {"data": base64.b64encode(item.data).decode(), "format": "wav"}}
    if item.modality == "video":
        frames = ",".join(base64.b64encode(frame.data).decode() for frame in item.frames.frames)
        return {"type": "video_url", "video_url": {"url": f"data:video/jpeg;base64,{frames}"}}
    url = f"data:image/png;base64,{base64.b64encode(item.data).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def salted(request: Request, salt: str) -> Request:
    """Return the request with a cache salt, so that no cache contains its prefix or media. The answer does not change.

    If ``salt`` is empty, returns the request itself.
    """
    if not salt:
        return request
    if isinstance(request.message, dict):
        return Request(request.kind, request.way, request.message | {"cache_salt": salt})
    if "cache_salt" not in request.message.DESCRIPTOR.fields_by_name:
        return request
    message = type(request.message)()
    message.CopyFrom(request.message)
    message.cache_salt = salt
    return Request(request.kind, request.way, message)


async def forget(admin_port: int, *, inputs: bool = True, embeds: bool = True) -> None:
    """Clear the media caches and the encoder caches of all engines of a frontend, through its operator API."""
    async with make_channel(f"127.0.0.1:{admin_port}") as channel:
        admin = admin_rpc.AdminServiceStub(channel)
        if inputs:
            await admin.ResetMultimodalCache(admin_pb.ResetMultimodalCacheRequest())
        if embeds:
            await admin.ResetEncoderCache(admin_pb.ResetEncoderCacheRequest())
