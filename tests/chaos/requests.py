"""Requests of every shape, greedy or seeded. Their outputs are the same each time."""

import json
from collections.abc import Callable
from typing import Any, Literal

import msgspec

from penstock.common.v1 import sampling_pb2 as sampling_pb
from penstock.common.v1.structured_output_pb2 import Choice, StructuredOutput
from penstock.inference.v1 import messages_pb2 as pb

Way = Literal["Generate", "GenerateSession", "Chat", "Embed", "/v1/completions", "/v1/chat/completions"]
SAMPLED: dict[str, Any] = {"temperature": 1.0, "top_p": 0.95, "frequency_penalty": 0.2, "repetition_penalty": 1.05}
ANIMALS = ("fox", "bear", "bird", "cat", "dog", "frog", "duck", "mouse")
PLACES = ("by the river", "in a small house", "on a hill", "near the lake", "in the old town")
NAMES = {"type": "array", "items": {"type": "string", "minLength": 4, "maxLength": 30}, "minItems": 200}
STOPS = ("the king said that the zebra", "and then there were seven hundred", ". The end of all")
"""Stop strings whose beginnings are common in stories, but which never occur completely. The frontend often delays
text because the text could be the beginning of a stop string.
"""


class Request(msgspec.Struct, frozen=True):
    """A request.

    Attributes:
        kind: Name of the request's kind in tables.
        message: Message of gRPC, or JSON body of HTTP.
    """

    kind: str
    way: Way
    message: Any

    @property
    def cumulative(self) -> bool:
        """Whether each message contains the complete output so far."""
        kind = self.message.sampling_params.output_kind if self.way in ("Generate", "GenerateSession", "Chat") else 0
        return kind != 0 and kind != sampling_pb.OUTPUT_KIND_DELTA


def prompt(number: int) -> str:
    """Return the beginning of a story. Forty numbers give different beginnings."""
    return f"Once upon a time there was a {ANIMALS[number % 8]} who lived {PLACES[number // 8 % 5]}."


def generate(kind: str, number: int, *, way: Way = "Generate", **sampling: Any) -> Request:
    """Return a request that continues a prompt."""
    params = sampling_pb.SamplingParams(**sampling)
    return Request(kind, way, pb.GenerateRequest(text=prompt(number), sampling_params=params))


def chat(kind: str, number: int, **sampling: Any) -> Request:
    """Return a chat request."""
    asked = f"Tell me a story about a {ANIMALS[number % 8]} {PLACES[number // 8 % 5]}."
    return Request(
        kind,
        "Chat",
        pb.ChatRequest(
            messages=[pb.ChatMessage(role="user", content=asked)],
            sampling_params=sampling_pb.SamplingParams(**sampling),
        ),
    )


def completion(kind: str, number: int, **fields: Any) -> Request:
    """Return a request for a streamed completion over HTTP."""
    usage = {"include_usage": True}
    body = {"prompt": prompt(number), "stream": True, "stream_options": usage, "return_token_ids": True, **fields}
    return Request(kind, "/v1/completions", body)


def chat_completion(kind: str, number: int, **fields: Any) -> Request:
    """Return a request for a streamed chat completion over HTTP."""
    messages = [{"role": "user", "content": f"What does the {ANIMALS[number % 8]} do {PLACES[number // 8 % 5]}?"}]
    usage = {"include_usage": True}
    body = {"messages": messages, "stream": True, "stream_options": usage, "return_token_ids": True, **fields}
    return Request(kind, "/v1/chat/completions", body)


def _greedy(number: int, tokens: int) -> dict[str, Any]:
    return {"temperature": 0.0, "max_tokens": tokens, "ignore_eos": True}


def _seeded(number: int, tokens: int) -> dict[str, Any]:
    return {**SAMPLED, "seed": number, "max_tokens": tokens, "ignore_eos": True}


def _schema(schema: object) -> StructuredOutput:
    return StructuredOutput(json_schema=json.dumps(schema))


LONG: tuple[Callable[[int, int], Request], ...] = (
    lambda i, t: generate("greedy", i, **_greedy(i, t)),
    lambda i, t: generate("sampled", i, **_seeded(i, t)),
    lambda i, t: generate("greedy, logprobs", i, **_greedy(i, t), logprobs=3),
    lambda i, t: generate("sampled, n=3", i, **_seeded(i, t // 2), n=3),
    lambda i, t: generate("greedy, stop strings", i, **_greedy(i, t), stop=STOPS),
    lambda i, t: generate("sampled, stop strings", i, **_seeded(i, t), stop=STOPS),
    lambda i, t: generate("greedy, schema", i, **_greedy(i, t), structured_output=_schema(NAMES)),
    lambda i, t: generate("sampled, schema", i, **_seeded(i, t), structured_output=_schema(NAMES)),
    lambda i, t: generate("greedy, final", i, **_greedy(i, t), output_kind=sampling_pb.OUTPUT_KIND_FINAL),
    lambda i, t: generate(
        "sampled, n=3, final, all logprobs",
        i,
        **_seeded(i, t // 2),
        n=3,
        logprobs=1,
        prompt_logprobs=1,
        output_kind=sampling_pb.OUTPUT_KIND_FINAL,
    ),
    lambda i, t: chat("chat, greedy", i, **_greedy(i, t)),
    lambda i, t: chat("chat, sampled", i, **_seeded(i, t)),
    lambda i, t: completion("HTTP, greedy", i, **_greedy(i, t)),
    lambda i, t: chat_completion("HTTP chat, sampled, logprobs", i, **_seeded(i, t), logprobs=True, top_logprobs=2),
    lambda i, t: generate("session, greedy", i, way="GenerateSession", **_greedy(i, t)),
    lambda i, t: generate(
        "session, sampled, cumulative",
        i,
        way="GenerateSession",
        **_seeded(i, t),
        output_kind=sampling_pb.OUTPUT_KIND_CUMULATIVE,
        stream_interval=20,
    ),
)
"""Functions that make requests which run to their maximum length. Every second request samples."""


def long_ones(count: int, tokens: int) -> list[Request]:
    """Return ``count`` long requests of all shapes in turn.

    Each request asks for 0.75 to 1.25 times ``tokens`` output tokens. Requests with ``n`` ask for half of that.
    """
    return [LONG[i % len(LONG)](i, tokens * (12 + i % 9) // 16) for i in range(count)]


SHORT: tuple[Callable[[int, int], Request], ...] = (
    *LONG,
    lambda i, t: generate("to its end", i, temperature=0.0, max_tokens=400),
    lambda i, t: generate("stop string met", i, temperature=0.0, max_tokens=200, stop=[" the ", "."]),
    lambda i, t: generate(
        "choice", i, temperature=0.0, structured_output=StructuredOutput(choice=Choice(options=ANIMALS))
    ),
    lambda i, t: generate(
        "regex", i, seed=i, structured_output=StructuredOutput(regex=r"[A-Z][a-z]{3,20}( [a-z]+){8}\.")
    ),
    lambda i, t: chat_completion("HTTP chat to its end", i, temperature=0.0, max_tokens=300),
)
"""Functions that make requests, including requests that end before their maximum length."""
REFUSED: tuple[Callable[[int], Request], ...] = (
    lambda i: generate("refused: temperature", i, temperature=-1.0),
    lambda i: generate("refused: n", i, n=0),
    lambda i: generate("refused: schema", i, structured_output=StructuredOutput(json_schema='{"type": 7}')),
    lambda i: generate("refused: session", i, way="GenerateSession", top_p=7.0),
    lambda i: Request("refused: model", "Generate", pb.GenerateRequest(model="nobody", text="x")),
    lambda i: Request("refused: empty", "Generate", pb.GenerateRequest()),
    lambda i: Request("refused: chat", "Chat", pb.ChatRequest()),
    lambda i: Request("refused: embed", "Embed", pb.EmbedRequest(inputs=[pb.PoolingInput(text="x")])),
    lambda i: completion("refused: HTTP", i, temperature="warm"),
    lambda i: chat_completion("refused: HTTP format", i, response_format={"type": "xml"}),
)
"""Functions that make requests which get an error."""


def short_ones(count: int, tokens: int) -> list[Request]:
    """Return ``count`` requests of all shapes, including refused ones."""
    makers = [*SHORT, *((lambda i, t, make=make: make(i)) for make in REFUSED)]
    return [makers[i % len(makers)](i, tokens * (4 + i % 9) // 8) for i in range(count)]
