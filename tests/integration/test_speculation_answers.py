"""HTTP answers, whole and streamed, are the same with and without speculation."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio
import torch
from tokenizers import Tokenizer

from penstock_enginecore.config import CacheConfig, EngineCoreConfig, ExecutorConfig, ModelConfig, SpeculativeConfig
from penstock_enginecore.executor.uniproc import UniprocExecutor
from penstock_enginecore.structured_output.factory import make_grammar_backend
from tests.fakes.engines.engine_server import EngineServer
from tests.fakes.frontends.openai_server import OpenAIServer, openai_server

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

DEMO = Path(__file__).resolve().parents[2] / "examples/demo_model/penstock-tiny"
TOKENIZER = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
METHODS: dict[str, dict[str, Any]] = {
    "draft_model": {"method": "draft_model", "model": str(DEMO.with_name("penstock-tiny-draft"))},
    "ngram": {"method": "ngram"},
    "suffix": {"method": "suffix"},
}
PROMPTS = (
    "Once upon a time",
    "one two three one two three one two",
    "The dog and the cat. The dog and the bird. The dog and",
)
NOT_THE_ANSWERS = ("id", "created", "system_fingerprint", "object", "model")


def ids_of(*texts: str) -> list[int]:
    return [token for text in texts for token in TOKENIZER.encode(text, add_special_tokens=False).ids]


COMPLETIONS: dict[str, dict[str, Any]] = {
    "n": {"n": 3},
    "n, greedy": {"n": 3, "temperature": 0},
    "stop": {"n": 3, "stop": [" the", "."]},
    "stop, kept": {"n": 3, "stop": ["he", " was"], "include_stop_str_in_output": True},
    "stop, greedy": {"temperature": 0, "stop": ["nd", " she"]},
    "long stop": {"n": 3, "stop": ["said to", "wanted to", "was a little", "it was"], "max_tokens": 96},
    "stop token": {"n": 3, "stop_token_ids": ids_of(" the", " a", ".")},
    "min tokens": {"n": 3, "stop_token_ids": ids_of(" the", " a", "."), "min_tokens": 11},
    "min tokens, stop": {"n": 3, "stop": [" the", "."], "min_tokens": 11},
    "logprobs": {"n": 3, "logprobs": 3},
    "logprobs, stop": {"n": 3, "logprobs": 2, "stop": [" the", ","]},
    "prompt logprobs": {"n": 2, "logprobs": 1, "prompt_logprobs": 1},
    "echo": {"n": 2, "logprobs": 0, "echo": True},
    "penalties": {"n": 3, "repetition_penalty": 1.3, "frequency_penalty": 0.7, "presence_penalty": 0.4},
    "penalties, greedy": {"temperature": 0, "frequency_penalty": 1.2, "logprobs": 1},
    "bad words": {"n": 3, "bad_words": [" the", " was a", " little", " she"]},
    "bias": {"n": 3, "logit_bias": {str(token): 6.0 for token in ids_of(" fox", " king")}, "logprobs": 1},
    "allowed": {"n": 3, "allowed_token_ids": sorted({*range(20, 60), *ids_of(" the", " dog", " and", ".", " cat")})},
    "filters": {"n": 3, "top_k": 30, "top_p": 0.9, "min_p": 0.01, "temperature": 1.1},
    "best of": {"n": 1, "best_of": 3},
    "interval": {"n": 3, "stream_interval": 7, "logprobs": 1, "stop": [" the"]},
    "repeats": {"temperature": 0, "repetition_detection": {"max_pattern_size": 8, "min_count": 3}},
    "drafts of its own number": {"n": 3, "num_speculative_tokens": 2},
    "regex": {"n": 3, "structured_outputs": {"regex": r"( [a-z]{2,8}){3,9}\."}, "logprobs": 1},
    "regex, given tokens": {
        "n": 3,
        "structured_outputs": {"regex": r"( [a-z]{2,8}){3,9}\."},
        "logprobs": 0,
        "logprob_token_ids": ids_of(" the", " fox", "."),
    },
    "everything": {
        "n": 3,
        "stop": [" the", "he w"],
        "stop_token_ids": ids_of("!"),
        "min_tokens": 7,
        "logprobs": 2,
        "frequency_penalty": 0.6,
        "bad_words": [" was", " little"],
        "logit_bias": {str(ids_of(" fox")[0]): 3.0},
        "top_p": 0.95,
    },
}
CHATS: dict[str, dict[str, Any]] = {
    "n": {"n": 3},
    "stop": {"n": 3, "stop": [" the", "."], "logprobs": True, "top_logprobs": 2},
    "greedy": {"temperature": 0, "stop": [" was"]},
    "penalties": {"n": 3, "presence_penalty": 0.9, "frequency_penalty": 0.5, "min_tokens": 9, "bad_words": [" the"]},
    "json": {"n": 2, "response_format": {"type": "json_object"}, "logprobs": True},
}
WHOLE_ONLY = ("prompt_logprobs", "best_of", "echo")
"""Parameters that are not supported for streams."""
CASES = [
    pytest.param(path, name, id=f"{path} {name}")
    for path, cases in (("completions", COMPLETIONS), ("chat/completions", CHATS))
    for name in cases
]


class Stacks:
    """A frontend and an engine for each speculation method, and one of each without speculation."""

    def __init__(self, servers: dict[str, OpenAIServer], engines: dict[str, EngineServer]) -> None:
        self.servers = servers
        self.engines = engines

    def accepted(self, method: str) -> int:
        """Return the number of accepted draft tokens since the start."""
        stats = self.engines[method].engine.scheduler.stats().spec_decoding_stats
        return stats.num_accepted_tokens if stats is not None else 0


def engine_of(speculative: dict[str, Any]) -> EngineServer:
    """Start an engine with a ``speculative`` section. The engine always drafts the maximum number of tokens."""
    config = EngineCoreConfig(
        model=ModelConfig(path=str(DEMO), served_model_name="model", device="cpu"),
        cache=CacheConfig(block_size=16, num_blocks=512),
        executor=ExecutorConfig(num_threads=1),
        speculative=SpeculativeConfig(**speculative),
    )
    return EngineServer(config, UniprocExecutor(config), make_grammar_backend).start().load()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stacks() -> AsyncIterator[Stacks]:
    torch.set_num_threads(1)
    servers, engines = {}, {}
    async with AsyncExitStack() as stack:
        for name, speculative in ({"": {}} | METHODS).items():
            if speculative:
                speculative = {"num_speculative_tokens": 5, "adaptive": False} | speculative
            engines[name] = await asyncio.to_thread(engine_of, speculative)
            stack.push_async_callback(asyncio.to_thread, engines[name].stop)
            servers[name] = await stack.enter_async_context(openai_server(DEMO, engines=[engines[name].address]))
        yield Stacks(servers, engines)


def body_of(path: str, fields: dict[str, Any], prompt: str) -> dict[str, Any]:
    asked = {"messages": [{"role": "user", "content": prompt}]} if path.startswith("chat") else {"prompt": prompt}
    return (
        {"model": "model", "max_tokens": 48, "seed": 11, "temperature": 0.9, "return_token_ids": True} | asked | fields
    )


def counted(usage: dict[str, Any]) -> dict[str, Any]:
    """Return ``usage`` without counts of drafts and of cached prefixes. Prefix hits depend on the order of the
    requests.
    """
    details = dict(usage.get("completion_tokens_details") or {})
    for name in ("accepted_prediction_tokens", "rejected_prediction_tokens"):
        details.pop(name, None)
    assert not details
    return {name: value for name, value in usage.items() if not name.endswith("_tokens_details")}


async def whole(server: OpenAIServer, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """Return the answer without ids, times and counts of drafts."""
    answer = await server.http.post(f"/v1/{path}", json=body)
    assert answer.status_code == 200, answer.text
    read = answer.json()
    assert read["choices"]
    return {name: value for name, value in read.items() if name not in NOT_THE_ANSWERS} | {
        "usage": counted(read["usage"])
    }


async def streamed(server: OpenAIServer, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """Join a stream's chunks by choice. Joining is needed because drafts change the number of tokens per chunk."""
    choices: dict[int, dict[str, Any]] = {}
    usage: dict[str, Any] | None = None
    body = body | {"stream": True, "stream_options": {"include_usage": True}}
    async with server.http.stream("POST", f"/v1/{path}", json=body) as answer:
        assert answer.status_code == 200, await answer.aread()
        async for line in answer.aiter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            chunk = msgspec.json.decode(line.removeprefix("data: "))
            usage = chunk.get("usage") or usage
            for choice in chunk["choices"]:
                _join(choices.setdefault(choice.pop("index"), {}), choice)
    assert usage is not None
    assert all(choice["finish_reason"] for choice in choices.values())
    return {"choices": choices, "usage": counted(usage)}


def _join(before: dict[str, Any], new: dict[str, Any]) -> None:
    """Merge the fields of a chunk: append texts and lists, and keep other values once set."""
    for name, value in new.items():
        if isinstance(value, dict):
            _join(before.setdefault(name, {}), value)
        elif isinstance(value, str | list) and name not in ("finish_reason", "stop_reason", "role"):
            before[name] = before[name] + value if before.get(name) else value
        elif value is not None:
            before[name] = value


@pytest.mark.parametrize(("path", "name"), CASES)
async def test_answers_are_those_of_an_engine_that_does_not_draft(stacks: Stacks, path: str, name: str) -> None:
    fields = (CHATS if path.startswith("chat") else COMPLETIONS)[name]
    bodies = [body_of(path, fields, prompt) for prompt in PROMPTS]
    ways = [whole, streamed]
    if not fields.keys().isdisjoint(WHOLE_ONLY):
        ways = [whole]
    for way in ways:
        expected = await asyncio.gather(*(way(stacks.servers[""], path, body) for body in bodies))
        for method in METHODS:
            before = stacks.accepted(method)
            found = await asyncio.gather(*(way(stacks.servers[method], path, body) for body in bodies))
            again = await asyncio.gather(*(way(stacks.servers[method], path, body) for body in bodies))
            for body, one, two, wanted in zip(bodies, found, again, expected, strict=True):
                assert one == wanted, (method, way.__name__, body)
                # The second run has cached prefixes and finished outputs to draft from.
                assert two == wanted, (method, way.__name__, body)
            if method == "suffix":
                assert stacks.accepted(method) > before
    assert not any(engine.engine.scheduler.drafter_failure for engine in stacks.engines.values())


async def test_every_method_has_drafted(stacks: Stacks) -> None:
    body = body_of("completions", {"n": 2, "max_tokens": 100, "temperature": 0, "ignore_eos": True}, PROMPTS[2])
    for method in METHODS:
        before = stacks.accepted(method)
        answer = await stacks.servers[method].http.post("/v1/completions", json=body)
        details = answer.json()["usage"]["completion_tokens_details"]
        assert stacks.accepted(method) - before == details["accepted_prediction_tokens"] > 0, method


@pytest.mark.parametrize("logprobs", [None, 1])
async def test_an_answer_that_ends_at_a_stop_string_says_what_came_of_its_drafts(
    stacks: Stacks, logprobs: int | None
) -> None:
    fields = {"max_tokens": 100, "temperature": 0, "ignore_eos": True, "logprobs": logprobs}
    body = body_of("completions", fields, PROMPTS[2])
    answer = (await stacks.servers[""].http.post("/v1/completions", json=body)).json()
    text = answer["choices"][0]["text"]
    stop = text[-12:]
    for method in ("draft_model", "ngram"):  # these methods draft the same tokens each time
        server = stacks.servers[method]
        stopped = (await server.http.post("/v1/completions", json=body | {"stop": [stop]})).json()
        assert stopped["choices"][0]["stop_reason"] == stop, method
        counts = stopped["usage"]["completion_tokens_details"]
        # With this limit, the engine ends the same answer by its length. Near the end, it drafts 4, 3, 2, 1 and 0
        # tokens instead of 5.
        length = {"max_tokens": stopped["usage"]["completion_tokens"]}
        ended = (await server.http.post("/v1/completions", json=body | length)).json()
        for name, count in ended["usage"]["completion_tokens_details"].items():
            assert abs(counts[name] - count) <= 1 + 2 + 3 + 4 + 5, (method, name, counts)
        assert counts["accepted_prediction_tokens"] > 5, method
