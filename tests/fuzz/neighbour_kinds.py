"""Kinds of the neighbours' requests, each with several prompts. Answers are always the same."""

import asyncio
import base64
import http.client
import json
import math
import operator
import uuid
from array import array
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

from penstock.common.v1 import pooling_pb2, structured_output_pb2
from penstock.common.v1.media_pb2 import Media
from penstock.common.v1.sampling_pb2 import SamplingParams
from penstock.inference.v1 import messages_pb2 as pb
from penstock.inference.v1 import service_pb2_grpc as rpc
from tests.fakes.media_files import image_file, sound_file
from tests.fakes.patience import PATIENCE
from tests.fuzz.variants import Variant

VARIETY = 3
"""Number of requests of each kind."""
_PROMPTS = ("Once upon a time there was", "The fox and the", "One day, a little girl went to the forest and")
_TENANT = "neighbour"
_IMAGES = [image_file(kind, (60, 44), seed=number) for number, kind in enumerate(("PNG", "JPEG", "WEBP"))]
_SOUNDS = [sound_file(kind, seconds=0.3 + number / 10) for number, kind in enumerate(("WAV", "FLAC", "OGG"))]
_SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 20},
            "age": {"type": "integer"},
            "ok": {"type": "boolean"},
        },
        "required": ["name", "age", "ok"],
        "additionalProperties": False,
    }
)


class Ask(NamedTuple):
    """One request. ``came`` is called with the number of received tokens."""

    stub: rpc.InferenceServiceStub
    http_port: int
    number: int
    came: Callable[[int], None]


class Kind(NamedTuple):
    """A kind of request.

    Attributes:
        ask: Returns the result that must be the same each time.
        same: Compares two results.
        timed: Whether the times of its tokens are recorded.
        pause: Seconds between requests.
        whole: Whether the longest wait is for a whole answer, instead of between two parts of it.
    """

    ask: Callable[[Ask], Awaitable[dict[str, Any]]]
    timed: bool
    pause: float
    same: Callable[[dict[str, Any], dict[str, Any]], bool] = operator.eq
    whole: bool = False


async def _generate(ask: Ask, medium: Media | None = None, **fields: Any) -> dict[str, Any]:
    params = SamplingParams(**{"max_tokens": 120, "ignore_eos": True, **fields})
    routing = pb.RoutingHints(tenant=_TENANT)
    request = pb.GenerateRequest(text=_PROMPTS[ask.number], sampling_params=params, routing=routing)
    if medium is not None:
        request.cache_salt = _salt()
        request.mixed.CopyFrom(_beside(medium, ask))
    tokens: dict[str, Any] = {}
    async for output in ask.stub.Generate(request, timeout=PATIENCE):
        ask.came(len(output.token_ids))
        tokens.setdefault(f"tokens {output.index}", []).extend(output.token_ids)
        if output.finish_reason:
            tokens[f"end {output.index}"] = output.finish_reason
    return tokens


async def _greedy(ask: Ask) -> dict[str, Any]:
    return await _generate(ask, temperature=0.0)


async def _seeded(ask: Ask) -> dict[str, Any]:
    return await _generate(ask, temperature=1.0, seed=ask.number + 11)


async def _constrained(ask: Ask) -> dict[str, Any]:
    constraint = structured_output_pb2.StructuredOutput(json_schema=_SCHEMA)
    return await _generate(ask, temperature=0.0, structured_output=constraint, ignore_eos=False, max_tokens=60)


async def _two(ask: Ask) -> dict[str, Any]:
    return await _generate(ask, temperature=0.8, seed=ask.number + 5, n=2, max_tokens=40)


async def _seeing(ask: Ask) -> dict[str, Any]:
    return await _generate(ask, Media(modality="image", data=_IMAGES[ask.number]), temperature=0.0, max_tokens=40)


async def _hearing(ask: Ask) -> dict[str, Any]:
    return await _generate(ask, Media(modality="audio", data=_SOUNDS[ask.number]), temperature=0.0, max_tokens=40)


def _beside(medium: Media, ask: Ask) -> pb.MixedPrompt:
    return pb.MixedPrompt(parts=[pb.PromptPart(media=medium), pb.PromptPart(text=_PROMPTS[ask.number])])


def _salt() -> str:
    """Return a new cache salt, so that the medium is decoded and encoded again."""
    return uuid.uuid4().hex


async def _over_http(ask: Ask) -> dict[str, Any]:
    return await _streamed(ask, "/v1/completions", {"prompt": _PROMPTS[ask.number], "logprobs": 1})


async def _seeing_over_http(ask: Ask) -> dict[str, Any]:
    url = "data:image/png;base64," + base64.b64encode(_IMAGES[ask.number]).decode()
    parts = [{"type": "text", "text": "What is this?"}, {"type": "image_url", "image_url": {"url": url}}]
    body = {"messages": [{"role": "user", "content": parts}], "cache_salt": _salt()}
    return await _streamed(ask, "/v1/chat/completions", body)


async def _streamed(ask: Ask, path: str, body: dict[str, Any]) -> dict[str, Any]:
    loop = asyncio.get_running_loop()

    def came(count: int) -> None:
        loop.call_soon_threadsafe(ask.came, count)

    return await asyncio.to_thread(_stream, ask, path, body, came)


def _stream(ask: Ask, path: str, prompt: dict[str, Any], came: Callable[[int], None]) -> dict[str, Any]:
    """Read a completion as a stream of events. Raises ValueError for any other answer."""
    connection = http.client.HTTPConnection("127.0.0.1", ask.http_port, timeout=PATIENCE)
    body = {
        **prompt,
        "stream": True,
        "max_tokens": 40,
        "temperature": 0.7,
        "seed": 3,
        "ignore_eos": True,
    }
    headers = {"content-type": "application/json", "x-penstock-tenant": _TENANT}
    text, reasons = "", []
    try:
        connection.request("POST", path, json.dumps(body), headers)
        answer = connection.getresponse()
        if answer.status != 200:
            raise ValueError(f"{answer.status}: {answer.read()[:300]!r}")
        for line in answer:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            if "error" in event:
                raise ValueError(str(event["error"]))
            for choice in event.get("choices", ()):
                came(1)
                text += choice["text"] if "text" in choice else choice["delta"].get("content") or ""
                reasons += [choice["finish_reason"]] if choice["finish_reason"] else []
    except http.client.HTTPException as e:
        raise ValueError(f"{type(e).__name__}: {e}") from None
    finally:
        connection.close()
    return {"text": text, "reasons": reasons}


async def _embed(
    ask: Ask, task: pooling_pb2.PoolingTask = pooling_pb2.POOLING_TASK_EMBED, *, sees: bool = False
) -> dict[str, Any]:
    inputs = [pb.PoolingInput(text=_PROMPTS[ask.number])]
    if sees:
        inputs[0].mixed.CopyFrom(_beside(Media(modality="image", data=_IMAGES[ask.number]), ask))
    params = pooling_pb2.PoolingParams(task=task)
    routing = pb.RoutingHints(tenant=_TENANT)
    request = pb.EmbedRequest(inputs=inputs, pooling_params=params, routing=routing)
    answer = await ask.stub.Embed(request, timeout=PATIENCE)
    ask.came(1)
    (vector,) = answer.embeddings
    return {"vector": array("f", vector.inline).tolist(), "shape": list(vector.shape)}


async def _embed_tokens(ask: Ask) -> dict[str, Any]:
    return await _embed(ask, pooling_pb2.POOLING_TASK_TOKEN_EMBED)


async def _embed_images(ask: Ask) -> dict[str, Any]:
    return await _embed(ask, sees=True)


async def _health(ask: Ask) -> dict[str, Any]:
    return await _short_over_http(ask, "GET", "/health", None)


async def _tokenize(ask: Ask) -> dict[str, Any]:
    answer = await ask.stub.Tokenize(pb.TokenizeRequest(text=_PROMPTS[ask.number]), timeout=PATIENCE)
    ask.came(len(answer.token_ids))
    return {"token_ids": list(answer.token_ids)}


async def _tokenize_over_http(ask: Ask) -> dict[str, Any]:
    return await _short_over_http(ask, "POST", "/tokenize", {"prompt": _PROMPTS[ask.number]})


async def _short_over_http(ask: Ask, method: str, path: str, body: dict[str, Any] | None) -> dict[str, Any]:
    found = await asyncio.to_thread(_answer, ask.http_port, method, path, body)
    ask.came(1)
    return {"body": found.decode()}


def _answer(port: int, method: str, path: str, body: dict[str, Any] | None) -> bytes:
    """Return the body of an answer on a new connection. Raises ValueError for any status except 200."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
    try:
        given = None if body is None else json.dumps(body)
        connection.request(method, path, given, {"content-type": "application/json"})
        answer = connection.getresponse()
        found = answer.read()
    except http.client.HTTPException as e:
        raise ValueError(f"{type(e).__name__}: {e}") from None
    finally:
        connection.close()
    if answer.status != 200:
        raise ValueError(f"{answer.status}: {found[:300]!r}")
    return found


def _close(answer: dict[str, Any], expected: dict[str, Any]) -> bool:
    """Return whether the answers are equal up to rounding, which depends on the batch."""
    if answer["shape"] != expected["shape"]:
        return False
    pairs = zip(answer["vector"], expected["vector"], strict=True)
    return all(math.isclose(a, b, rel_tol=1e-3, abs_tol=1e-4) for a, b in pairs)


KINDS = {
    "greedy": Kind(_greedy, timed=True, pause=0.0),
    "seeded": Kind(_seeded, timed=True, pause=0.0),
    "constrained": Kind(_constrained, timed=False, pause=0.2),
    "two": Kind(_two, timed=False, pause=0.2),
    "http": Kind(_over_http, timed=False, pause=0.2),
    "health": Kind(_health, timed=False, pause=0.2, whole=True),
    "short": Kind(_tokenize, timed=False, pause=0.1, whole=True),
    "short over http": Kind(_tokenize_over_http, timed=False, pause=0.1, whole=True),
    "image": Kind(_seeing, timed=False, pause=0.2),
    "image over http": Kind(_seeing_over_http, timed=False, pause=0.2),
    "sound": Kind(_hearing, timed=False, pause=0.2),
    "embed": Kind(_embed, timed=False, pause=0.02, same=_close),
    "embed tokens": Kind(_embed_tokens, timed=False, pause=0.1, same=_close),
    "embed images": Kind(_embed_images, timed=False, pause=0.1, same=_close),
}


def kinds_of(variant: Variant) -> tuple[str, ...]:
    """Return the kinds of requests that the system supports."""
    if variant.pools:
        return ("embed", "embed tokens", "embed images") if variant.media else ("embed", "embed tokens")
    if not variant.media:
        return "greedy", "seeded", "constrained", "two", "http"
    media = ("sound",) if variant.media == ("audio",) else ("image", "image over http")
    return "greedy", "seeded", "http", *media
