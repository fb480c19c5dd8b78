"""What the neighbours ask for, each several times with other prompts: always the same answers."""

import asyncio
import http.client
import json
import math
import operator
from array import array
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

from penstock.common.v1 import pooling_pb2, structured_output_pb2
from penstock.common.v1.sampling_pb2 import SamplingParams
from penstock.inference.v1 import messages_pb2 as pb
from penstock.inference.v1 import service_pb2_grpc as rpc

VARIETY = 3
"""Requests of each kind."""
_PROMPTS = ("Once upon a time there was", "The fox and the", "One day, a little girl went to the forest and")
_TENANT = "neighbour"
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
    """One request. ``came`` is told how many tokens have come."""

    stub: rpc.InferenceServiceStub
    http_port: int
    number: int
    came: Callable[[int], None]


class Kind(NamedTuple):
    """``ask`` returns what must be the same each time, as ``same`` says. ``timed``: the moments of its tokens count. ``pause``:
    seconds.
    """

    ask: Callable[[Ask], Awaitable[dict[str, Any]]]
    timed: bool
    pause: float
    same: Callable[[dict[str, Any], dict[str, Any]], bool] = operator.eq


async def _generate(ask: Ask, **fields: Any) -> dict[str, Any]:
    params = SamplingParams(**{"max_tokens": 120, "ignore_eos": True, **fields})
    routing = pb.RoutingHints(tenant=_TENANT)
    request = pb.GenerateRequest(text=_PROMPTS[ask.number], sampling_params=params, routing=routing)
    tokens: dict[str, Any] = {}
    async for output in ask.stub.Generate(request, timeout=100):
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


async def _over_http(ask: Ask) -> dict[str, Any]:
    loop = asyncio.get_running_loop()

    def came(count: int) -> None:
        loop.call_soon_threadsafe(ask.came, count)

    return await asyncio.to_thread(_stream, ask, came)


def _stream(ask: Ask, came: Callable[[int], None]) -> dict[str, Any]:
    """A completion as a stream of events. ValueError for anything else."""
    connection = http.client.HTTPConnection("127.0.0.1", ask.http_port, timeout=100)
    body = {
        "prompt": _PROMPTS[ask.number],
        "stream": True,
        "max_tokens": 40,
        "temperature": 0.7,
        "seed": 3,
        "ignore_eos": True,
        "logprobs": 1,
    }
    headers = {"content-type": "application/json", "x-penstock-tenant": _TENANT}
    text, reasons = "", []
    try:
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
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
                text += choice["text"]
                reasons += [choice["finish_reason"]] if choice["finish_reason"] else []
    except http.client.HTTPException as e:
        raise ValueError(f"{type(e).__name__}: {e}") from None
    finally:
        connection.close()
    return {"text": text, "reasons": reasons}


async def _embed(ask: Ask, task: pooling_pb2.PoolingTask = pooling_pb2.POOLING_TASK_EMBED) -> dict[str, Any]:
    inputs = [pb.PoolingInput(text=_PROMPTS[ask.number])]
    params = pooling_pb2.PoolingParams(task=task)
    routing = pb.RoutingHints(tenant=_TENANT)
    request = pb.EmbedRequest(inputs=inputs, pooling_params=params, routing=routing)
    answer = await ask.stub.Embed(request, timeout=100)
    ask.came(1)
    (vector,) = answer.embeddings
    return {"vector": array("f", vector.inline).tolist(), "shape": list(vector.shape)}


async def _embed_tokens(ask: Ask) -> dict[str, Any]:
    return await _embed(ask, pooling_pb2.POOLING_TASK_TOKEN_EMBED)


def _close(answer: dict[str, Any], expected: dict[str, Any]) -> bool:
    """Equal up to rounding, which differs with what is computed beside them."""
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
    "embed": Kind(_embed, timed=False, pause=0.02, same=_close),
    "embed tokens": Kind(_embed_tokens, timed=False, pause=0.1, same=_close),
}
GENERATING = ("greedy", "seeded", "constrained", "two", "http")
POOLING = ("embed", "embed tokens")
