"""Attacks by number. Each request depends only on the seed and the request's number."""

import json
from collections.abc import Callable, Sequence
from random import Random
from typing import Any, NamedTuple

from penstock.common.v1 import sampling_pb2, structured_output_pb2
from penstock.enginecore.v1 import messages_pb2 as engine
from penstock.inference.v1 import messages_pb2 as pb
from tests.fakes.patience import PATIENCE
from tests.fuzz import hostile_grammars, http2_garbage, http_calls, json_places, rpc_calls, schemas, sizes
from tests.fuzz.hostile_grammars import RAW, Constraint
from tests.fuzz.http_calls import HttpCase
from tests.fuzz.media.attacks import Killing, MediaAttacks
from tests.fuzz.rpc_calls import Case
from tests.fuzz.rpcs import CONTROL, Rpc, rpcs
from tests.fuzz.seeds import HELLO, SCHEMA
from tests.fuzz.variants import LETTER, SETS, VARIANTS, Variant, variant_of

_PATIENCE = 60.0
_WEIGHTS = {
    "rpc": (40.0, 40.0),
    "http": (16.0, 16.0),
    "garbage": (1.0, 1.0),
    "json in bodies": (9.0, 9.0),
    "json in chats": (5.0, 3.0),
    "schemas": (16.0, 2.0),
    "grammars": (3.0, 0.5),
    "tensors": (6.0, 2.0),
    "mixed prompts": (3.0, 1.0),
    "limits together": (2.0, 6.0),
    "large frames": (1.5, 8.0),
}
"""Weights of the attacks, for generating models and for pooling models."""


class Attempt(NamedTuple):
    """One hostile request. ``attack`` is the most specific kind, and ``payload`` is the call to make."""

    number: int
    attack: str
    target: str
    payload: Case | HttpCase | Killing | bytes

    @property
    def shown(self) -> str:
        """Return the payload as shortened text."""
        match self._call:
            case Case() as case:
                return f"{case.metadata or ''} {[message[:1000] for message in case.sent]!r:.1200}"
            case HttpCase() as case:
                return f"{case.raw[:1200]!r}"
            case data:
                return f"{data[:200]!r}"

    def patient(self) -> "Attempt":
        """Return the same request with a timeout that is long enough for a busy machine."""
        if not isinstance(self.payload, Case | HttpCase):
            return self
        return self._replace(payload=self.payload._replace(timeout=max(self.payload.timeout, PATIENCE)))

    @property
    def size(self) -> int:
        """Number of bytes to send."""
        match self._call:
            case Case() as case:
                return sum(map(len, case.sent))
            case HttpCase() as case:
                return len(case.raw)
            case data:
                return len(data)

    @property
    def _call(self) -> Case | HttpCase | bytes:
        return self.payload.call if isinstance(self.payload, Killing) else self.payload


class Attacks:
    """Makes requests. ``turns`` is the sequence of variants, and ``port`` is the port of the hostile media host."""

    def __init__(self, seed: int, turns: Sequence[str] = SETS["all"], port: int = 0) -> None:
        self._seed = seed
        self.turns = turns
        self.rpcs = [rpc for rpc in rpcs() if rpc.method not in CONTROL or rpc.port != "admin"]
        self.rpcs = [rpc for rpc in self.rpcs if rpc.method not in ("StartProfile", "StopProfile")]
        self._ours = {rpc.method: rpc for rpc in reversed(self.rpcs) if "vllm" not in rpc.path}
        self._media = MediaAttacks(self._ours | {f"vllm {r.method}": r for r in self.rpcs if "vllm" in r.path}, port)
        self._makers: dict[str, Callable[[Random, Variant], Case | HttpCase | bytes]] = {
            "rpc": self._any_rpc,
            "http": lambda rng, _: http_calls.make_case(rng),
            "garbage": lambda rng, _: http2_garbage.garbage(rng),
            "json in bodies": self._body,
            "json in chats": self._chat,
            "schemas": lambda rng, _: self._constrained(hostile_grammars.any_text(rng), rng),
            "grammars": lambda rng, _: self._constrained(hostile_grammars.constraint(rng), rng, (8, 16, 16, 16)),
            "tensors": lambda rng, v: sizes.tensors(rng, v, self._ours["Generate"], self._ours["Session"]),
            "mixed prompts": lambda rng, v: sizes.mixed(rng, v, self._ours["Generate"]),
            "limits together": lambda rng, v: sizes.at_the_limits(rng, v, self._ours["Generate"], self._ours["Score"]),
            "large frames": lambda rng, v: sizes.large_frames(rng, v, self._ours["Generate"], self._ours["Embed"]),
        }

    def make(self, number: int) -> Attempt:
        """Return the request with this number."""
        rng = Random(f"{self._seed} {number}")
        variant = VARIANTS[variant_of(number, self.turns)]
        if variant.media:
            attack, made = self._media.make(rng, variant)
            call = made.call if isinstance(made, Killing) else made
            return Attempt(number, attack, call.rpc.name if isinstance(call, Case) else f"http {call.path}", made)
        weights = [_WEIGHTS[name][variant.pools] for name in self._makers]
        attack = rng.choices(list(self._makers), weights)[0]
        payload = self._makers[attack](rng, variant)
        match payload:
            case Case() as case:
                target = case.rpc.name
                attack = f"{attack} {target} {case.seed}" if attack == "rpc" else attack
            case HttpCase() as case:
                target = f"http {case.path}"
            case _:
                target = "(HTTP/2 garbage)"
        return Attempt(number, attack, target, payload)

    def _any_rpc(self, rng: Random, _: Variant) -> Case:
        return rpc_calls.make_case(rng.choices(self.rpcs, [rpc.weight for rpc in self.rpcs])[0], rng)

    def _body(self, rng: Random, _: Variant) -> HttpCase:
        """Return a body with null, empty or wrong values at random paths."""
        path = rng.choice(list(http_calls.SEEDS))
        body = http_calls.bounded(json_places.changed(rng.choice(http_calls.SEEDS[path]), rng))
        return _post(path, json_places.text(body))

    def _chat(self, rng: Random, _: Variant) -> Case | HttpCase:
        """Return a chat with hostile JSON: arguments of tool calls, parameters of tools, or template variables."""
        parameters = schemas.schema(rng) if rng.random() < 0.5 else SCHEMA
        arguments = json_places.text(json_places.changed({"a": 1, "b": [{"c": "d"}]}, rng))
        kwargs = schemas.template_kwargs(rng) if rng.random() < 0.5 else ""
        if rng.random() < 0.3:
            tool = {"type": "function", "function": {"name": "f", "parameters": RAW}}
            call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
            turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "tool_calls": [call]}]
            choice = rng.choice(("auto", "required", {"type": "function", "function": {"name": "f"}}))
            body: dict[str, Any] = {"messages": turns, "tools": [tool], "tool_choice": choice, "max_tokens": 4}
            return _post("/v1/chat/completions", json.dumps(body).replace(f'"{RAW}"', parameters))
        call = pb.ToolCall(id="1", name="f", arguments=arguments)
        message = pb.ChatRequest(
            messages=[
                pb.ChatMessage(role="user", content="hi"),
                pb.ChatMessage(role="assistant", tool_calls=[call]),
                pb.ChatMessage(role="tool", content=arguments, tool_call_id="1"),
            ],
            tools=[pb.Tool(name="f", description="d", parameters=parameters)],
            chat_template_kwargs=kwargs,
            sampling_params=_sampling(),
        )
        return Case(self._ours["Chat"], [message.SerializeToString()], timeout=_PATIENCE)

    def _constrained(self, found: Constraint, rng: Random, lengths: tuple[int, ...] = (1, 4, 8)) -> Case | HttpCase:
        """Return a request with a constraint: over gRPC, over HTTP, or directly to the engine.

        A logit bias prefers one letter, because constraints that grow with each token must not end with the first one.
        """
        tokens, bias = rng.choice(lengths), rng.choice((0.0, 100.0, 100.0, 100.0))
        how = rng.random()
        if how < 0.25:
            fields, raw = hostile_grammars.as_json(found, rng)
            path = rng.choice(("/v1/completions", "/v1/chat/completions"))
            body = {"prompt": "a"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "a"}]}
            text = json.dumps({**body, "max_tokens": tokens, "logit_bias": {str(LETTER): bias}, **fields})
            return _post(path, text.replace(f'"{RAW}"', raw))
        params = _sampling(tokens)
        params.logit_bias[LETTER] = bias
        written = found.text.encode(errors="surrogatepass").decode(errors="replace")
        params.structured_output.CopyFrom(structured_output_pb2.StructuredOutput(**{found.kind: written}))  # type: ignore[arg-type]
        if how < 0.85:
            message = pb.GenerateRequest(text="a", sampling_params=params)
            return Case(self._ours["Generate"], [message.SerializeToString()], timeout=_PATIENCE)
        params.seed = 1
        add = engine.EngineCoreRequest(request_id="c", prompt_token_ids=[5, 6], sampling_params=params)
        sent = [HELLO.SerializeToString(), engine.SessionRequest(add=add).SerializeToString()]
        return Case(self._ours["Session"], sent, timeout=_PATIENCE, cancel=0.7, half=True)

    def rpc(self, method: str) -> Rpc:
        """Return an RPC of Penstock's contracts by its method."""
        return self._ours[method]


def _sampling(max_tokens: int = 2) -> sampling_pb2.SamplingParams:
    return sampling_pb2.SamplingParams(max_tokens=max_tokens, temperature=0.0)


def _post(path: str, text: str) -> HttpCase:
    raw = http_calls.request("POST", path, text.encode(errors="surrogatepass"), [])
    return HttpCase(path, raw, timeout=_PATIENCE)
