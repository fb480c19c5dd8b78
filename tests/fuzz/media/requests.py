"""Prompts with hostile media in each protocol, with the allowed answers."""

import base64
import json
from collections.abc import Sequence
from random import Random
from typing import Any, NamedTuple

from smg_grpc_proto.generated import common_pb2 as smg
from smg_grpc_proto.generated import vllm_engine_pb2 as vllm

from penstock.common.v1 import media_pb2, tensor_pb2
from penstock.common.v1.sampling_pb2 import SamplingParams
from penstock.inference.v1 import messages_pb2 as pb
from penstock_common.types.media import EMBEDS, TensorData
from penstock_frontend.call_types import EncodedFile, Features, Frames, Url
from tests.fuzz.blame import Blame
from tests.fuzz.media.items import Item

Part = str | Item
_DTYPES = {
    name: tensor_pb2.DataType.Value(f"DATA_TYPE_{name.upper()}")
    for name in ("float32", "float16", "bfloat16", "int64", "int32", "uint8")
}
_MODALITIES = {"image": smg.IMAGE, "audio": smg.AUDIO, "video": smg.VIDEO}
_TOKENS = 2


class Prompt(NamedTuple):
    """A prompt. ``bad`` lists the parts that may be refused. ``reasons`` and ``taken`` are as in an item."""

    attack: str
    parts: Sequence[Part]
    bad: Sequence[int]
    reasons: frozenset[str]
    taken: bool
    salt: str = ""

    def blame(self, path: str) -> Blame:
        """Return the allowed answers for parts with this path. ``{}`` in the path is the part's index."""
        return Blame(self.reasons, self.taken, tuple(path.format(place) for place in self.bad))

    def blame_all(self, path: str) -> Blame:
        """Return the allowed answers if all media have common processor arguments. Then the first item is at fault."""
        if any(isinstance(part, Item) and part.arguments for part in self.parts):
            return Blame(self.reasons, self.taken, (path.partition("{}")[0],))
        return self.blame(path)


def can_be_http(prompt: Prompt) -> bool:
    """Return whether HTTP can express the prompt. Tensors, frame times, and arguments of one item need gRPC."""
    return not any(isinstance(part, Item) and isinstance(part.source, Features) for part in prompt.parts)


def media(item: Item) -> media_pb2.Media:
    """Return the item as a gRPC message."""
    made = media_pb2.Media(modality=item.modality)
    if item.arguments:
        made.processor_kwargs = json.dumps(item.arguments)
    match item.source:
        case EncodedFile(data=data):
            made.data = data
        case Url(url=url):
            made.url = url.encode(errors="replace").decode()
        case Frames(frames=frames):
            made.frames.SetInParent()
            made.frames.frames.extend(media_pb2.MediaFrame(data=each.data, timestamp=each.timestamp) for each in frames)
        case Features(tensors=tensors):
            if [*tensors] == [EMBEDS]:
                made.embeds.CopyFrom(tensor(tensors[EMBEDS]))
            else:
                made.features.SetInParent()
                for name, each in tensors.items():
                    made.features.tensors[name].CopyFrom(tensor(each))
    return made


def tensor(data: TensorData) -> tensor_pb2.Tensor:
    """Return a tensor message with the bytes inline."""
    return tensor_pb2.Tensor(dtype=_DTYPES[data.dtype], shape=data.shape, inline=bytes(data.data))  # type: ignore[arg-type]


def chat(prompt: Prompt) -> tuple[pb.ChatRequest, Blame]:
    """Return a chat request of one turn."""
    parts = [
        pb.ContentPart(text=part) if isinstance(part, str) else pb.ContentPart(media=media(part))
        for part in prompt.parts
    ]
    message = pb.ChatMessage(role="user", parts=parts)
    request = pb.ChatRequest(messages=[message], sampling_params=_sampling(), cache_salt=prompt.salt)
    return request, prompt.blame("messages[0].parts[{}]")


def generate(prompt: Prompt) -> tuple[pb.GenerateRequest, Blame]:
    """Return a generate request with a mixed prompt."""
    request = pb.GenerateRequest(mixed=_mixed(prompt), sampling_params=_sampling(), cache_salt=prompt.salt)
    return request, prompt.blame("mixed.parts[{}]")


def embed(prompt: Prompt) -> tuple[pb.EmbedRequest, Blame]:
    """Return an embedding request with a mixed input and a valid input."""
    inputs = [pb.PoolingInput(text="a"), pb.PoolingInput(mixed=_mixed(prompt))]
    return pb.EmbedRequest(inputs=inputs), prompt.blame("inputs[1].mixed.parts[{}]")


def _mixed(prompt: Prompt) -> pb.MixedPrompt:
    parts = [
        pb.PromptPart(text=part) if isinstance(part, str) else pb.PromptPart(media=media(part)) for part in prompt.parts
    ]
    return pb.MixedPrompt(parts=parts)


def references(prompt: Prompt, placeholders: dict[str, int]) -> tuple[vllm.GenerateRequest, Blame]:
    """Return the request of a gateway that forwards media references. ``placeholders`` has token ids by modality."""
    items = [part for part in prompt.parts if isinstance(part, Item)]
    ids = [5, 6]
    for item in items:
        ids += [placeholders.get(item.modality, 7), 8]
    refs = vllm.MediaRefs(
        items=[vllm.MediaRef(url=_url_of(item), modality=_MODALITIES[item.modality]) for item in items]
    )
    request = vllm.GenerateRequest(
        tokenized=vllm.TokenizedInput(original_text="x", input_ids=ids),
        sampling_params=vllm.SamplingParams(max_tokens=_TOKENS, temperature=0.0),
        media_refs=refs,
    )
    return request, Blame(prompt.reasons, prompt.taken, ("media_refs",))


def processed(item: Item, rng: Random, placeholder: int) -> tuple[vllm.GenerateRequest, Blame]:
    """Return the request of a gateway that has processed an image itself."""
    assert isinstance(item.source, Features)
    tensors = {name: _vllm_tensor(each) for name, each in item.source.tensors.items()}
    offset, length = rng.choice(((2, 4), (2, 4), (2, 4), (2, 4), (0, 0), (5, 4_000_000_000), (2, 1), (2**32 - 1, 1)))
    sizes = {"patches": vllm.TensorData(inline=(16).to_bytes(8, "little"), shape=[1], dtype="int64")}
    batch = vllm.MultimodalInputs(
        model_specific_tensors={name: each for name, each in tensors.items() if name != "pixel_values"} | sizes,
        mm_placeholders=[vllm.PlaceholderRange(offset=offset, length=length)],
        batched_keys=["image_grid_thw"],
        flat_keys={"pixel_values": "patches"},
        mm_hashes=[rng.choice(("", "0" * 64, "x" * 1000))],
        modality=smg.IMAGE,
    )
    if "pixel_values" in tensors:
        batch.pixel_values.CopyFrom(tensors["pixel_values"])
    request = vllm.GenerateRequest(
        tokenized=vllm.TokenizedInput(original_text="x", input_ids=[5, 6, *[placeholder] * 4, 7]),
        sampling_params=vllm.SamplingParams(max_tokens=_TOKENS, temperature=0.0),
    )
    if rng.random() < 0.7:
        request.mm_inputs.CopyFrom(batch)
    else:
        request.extra_mm_inputs.append(batch)
    right = (offset, length) in ((2, 4), (2, 1))
    return request, Blame(item.reasons | {"NOT_SERVED_YET"}, item.taken and right, ("mm_inputs", "extra_mm_inputs"))


def _vllm_tensor(data: TensorData) -> vllm.TensorData:
    shape = [length % 2**32 for length in data.shape]
    return vllm.TensorData(inline=bytes(data.data), shape=shape, dtype=data.dtype)


def chat_body(prompt: Prompt) -> tuple[str, dict[str, Any], Blame]:
    """Return the body of a chat completion, a tokenization or an embedding."""
    body = {
        "messages": [{"role": "user", "content": [_chat_part(part) for part in prompt.parts]}],
        **_arguments(prompt),
    }
    if prompt.salt:
        body["cache_salt"] = prompt.salt
    return (
        "/v1/chat/completions",
        {**body, "max_tokens": _TOKENS},
        prompt.blame_all("messages[0].content[{}]"),
    )


def responses_body(prompt: Prompt) -> tuple[str, dict[str, Any], Blame]:
    """Return the body for /v1/responses."""
    content = [
        {"type": "input_text", "text": part}
        if isinstance(part, str)
        else {"type": "input_image", "image_url": _url_of(part), "detail": "auto"}
        for part in prompt.parts
    ]
    body = {"input": [{"role": "user", "content": content}], "max_output_tokens": _TOKENS}
    return "/v1/responses", body, prompt.blame("input[0].content[{}]")


def messages_body(prompt: Prompt, rng: Random) -> tuple[str, dict[str, Any], Blame]:
    """Return the body for Anthropic's protocol."""
    blocks = [{"type": "text", "text": part} if isinstance(part, str) else _block(part) for part in prompt.parts]
    content: list[dict[str, Any]] = blocks
    where = "messages[0].content[{}]"
    if rng.random() < 0.2:
        content, where = [{"type": "tool_result", "tool_use_id": "t", "content": blocks}], "messages[0].content[0]"
    body = {"model": "penstock-tiny", "max_tokens": _TOKENS, "messages": [{"role": "user", "content": content}]}
    path = "/v1/messages/count_tokens" if rng.random() < 0.2 else "/v1/messages"
    return path, body, prompt.blame(where)


def _block(item: Item) -> dict[str, Any]:
    url = _url_of(item)
    if url.startswith("data:") and ";base64," in url:
        source = {"type": "base64", "media_type": "image/png", "data": url.partition(";base64,")[2]}
    else:
        source = {"type": "url", "url": url}
    return {"type": "image", "source": source}


def _chat_part(part: Part) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    url = _url_of(part)
    if part.modality == "audio" and isinstance(part.source, EncodedFile):
        return {"type": "input_audio", "input_audio": {"data": url.partition(",")[2], "format": "wav"}}
    name = f"{part.modality}_url"
    return {"type": name, name: {"url": url}}


def _arguments(prompt: Prompt) -> dict[str, Any]:
    found = {name: value for part in prompt.parts if isinstance(part, Item) for name, value in part.arguments.items()}
    return {"mm_processor_kwargs": found} if found else {}


def _url_of(item: Item) -> str:
    match item.source:
        case Url(url=url):
            return url
        case EncodedFile(data=data):
            return "data:image/png;base64," + base64.b64encode(data).decode()
        case Frames(frames=frames):
            return "data:video/jpeg;base64," + ",".join(base64.b64encode(each.data).decode() for each in frames)
    raise TypeError(item.source)


def _sampling() -> SamplingParams:
    return SamplingParams(max_tokens=_TOKENS, temperature=0.0)
