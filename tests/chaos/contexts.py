"""Requests with long common prefixes, as text and as embeddings, and their follow-up requests. Outputs are
deterministic.
"""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors import safe_open
from tokenizers import Tokenizer

from penstock.common.v1.sampling_pb2 import OUTPUT_KIND_FINAL, SamplingParams
from penstock.common.v1.tensor_pb2 import DATA_TYPE_FLOAT32, Tensor
from penstock.inference.v1 import messages_pb2 as pb
from tests.chaos.outcome import Outcome
from tests.chaos.requests import ANIMALS, PLACES, Request, Way, completion, prompt

SENTENCES = (24, 60)
"""Minimum and maximum number of sentences in a context. A sentence has fourteen tokens."""


class PromptVectors:
    """Converts prompts into embeddings with the embedding layer of a checkpoint."""

    def __init__(self, model: Path) -> None:
        self._tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        with safe_open(str(model / "model.safetensors"), framework="numpy") as weights:
            self._rows = weights.get_tensor("model.embed_tokens.weight")

    def __call__(self, text: str) -> Tensor:
        """Return the embeddings of a text, float32 of shape [tokens, hidden size]."""
        rows = self._rows[self._tokenizer.encode(text).ids].astype("<f4")
        return Tensor(dtype=DATA_TYPE_FLOAT32, shape=rows.shape, inline=rows.tobytes())


def context(number: int) -> str:
    """Return a prompt prefix of a few hundred tokens, different for each number."""
    rng = random.Random(number)
    sentences = [prompt(each) for each in range(40)] * 2
    rng.shuffle(sentences)
    return " ".join(sentences[: rng.randint(*SENTENCES)])


def question(number: int) -> str:
    """Return the part of a prompt after its context."""
    return f"Now the {ANIMALS[number % 8]} went {PLACES[number // 8 % 5]} and said:"


def context_ones(vectors: PromptVectors, count: int, tokens: int) -> list[Request]:
    """Return ``count`` requests of all shapes. Ten consecutive requests have the same context.

    Each request asks for 0.5 to 1.5 times ``tokens`` output tokens.
    """
    makers = _shapes(vectors)
    return [makers[i % len(makers)](i, tokens * (4 + i % 9) // 8) for i in range(count)]


def _shapes(vectors: PromptVectors) -> list[Callable[[int, int], Request]]:
    """Return functions that create a request from a number and a length.

    Embeddings of several sequences are sent in chunks. Embeddings of one sequence are sent in shared memory.
    """
    return [
        lambda i, t: _generate("long, greedy", i, t, temperature=0.0),
        lambda i, t: _generate("long, sampled", i, t),
        lambda i, t: _generate("long, sampled, n=3", i, t // 2, n=3),
        lambda i, t: _chat("long, chat", i, t),
        lambda i, t: completion(
            "long, HTTP", i, prompt=_text(i), temperature=0.0, max_tokens=max(1, t), ignore_eos=True
        ),
        lambda i, t: _generate("long, session, logprobs", i, t, way="GenerateSession", logprobs=2),
        lambda i, t: _generate("long, n=2, final", i, t // 2, n=2, output_kind=OUTPUT_KIND_FINAL),
        lambda i, t: _with_vectors("long, vectors", i, t, vectors(_text(i))),
        lambda i, t: _with_vectors("long, vectors, n=3", i, t // 2, vectors(_text(i)), n=3),
        lambda i, t: _mixed("long, mixed", i, t, vectors(context(i // 10))),
    ]


def _text(number: int) -> str:
    return f"{context(number // 10)} {question(number)}"


def _sampling(number: int, tokens: int, **fields: Any) -> SamplingParams:
    chosen: dict[str, Any] = {
        "temperature": 1.0,
        "top_p": 0.95,
        "seed": number,
        "max_tokens": max(1, tokens),
        "ignore_eos": True,
    }
    return SamplingParams(**chosen | fields)


def _generate(kind: str, number: int, tokens: int, *, way: Way = "Generate", **sampling: Any) -> Request:
    params = _sampling(number, tokens, **sampling)
    return Request(kind, way, pb.GenerateRequest(text=_text(number), sampling_params=params))


def _chat(kind: str, number: int, tokens: int) -> Request:
    messages = [pb.ChatMessage(role="user", content=_text(number))]
    return Request(kind, "Chat", pb.ChatRequest(messages=messages, sampling_params=_sampling(number, tokens)))


def _with_vectors(kind: str, number: int, tokens: int, tensor: Tensor, **sampling: Any) -> Request:
    params = _sampling(number, tokens, **sampling)
    return Request(kind, "Generate", pb.GenerateRequest(embeds=tensor, sampling_params=params))


def _mixed(kind: str, number: int, tokens: int, tensor: Tensor) -> Request:
    """Return a request whose prompt has embeddings between texts."""
    parts = [pb.PromptPart(text="Listen."), pb.PromptPart(embeds=tensor), pb.PromptPart(text=question(number))]
    params = _sampling(number, tokens)
    return Request(kind, "Generate", pb.GenerateRequest(mixed=pb.MixedPrompt(parts=parts), sampling_params=params))


def next_turn(request: Request, outcome: Outcome, tokens: int) -> Request | None:
    """Return the follow-up request: the prompt, the answer ``outcome``, and more text. None if the request has no text
    or several answers.
    """
    message = request.message
    if not request.kind.startswith("long") or len(outcome.outputs) != 1:
        return None
    answer = outcome.outputs[0].text
    if isinstance(message, pb.ChatRequest):
        more = [pb.ChatMessage(role="assistant", content=answer), pb.ChatMessage(role="user", content=question(5))]
        following = pb.ChatRequest(messages=[*message.messages, *more], sampling_params=_sampling(5, tokens))
        return Request("second turn, chat", "Chat", following)
    if isinstance(message, pb.GenerateRequest) and message.text:
        text = f"{message.text}{answer} {question(5)}"
        return Request(
            "second turn",
            "Generate",
            pb.GenerateRequest(text=text, sampling_params=_sampling(5, tokens, temperature=0.0)),
        )
    return None
