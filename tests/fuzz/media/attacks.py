"""Requests with hostile media for each protocol and variant. Half of the requests use gRPC, and half use HTTP."""

import json
from collections.abc import Callable, Mapping
from random import Random
from typing import Any, NamedTuple

from tests.fuzz import json_places, mutate
from tests.fuzz.blame import Blame
from tests.fuzz.http_calls import HttpCase, request
from tests.fuzz.media import items, requests
from tests.fuzz.media.items import INVALID, TOO_MANY, UNREADABLE, Item
from tests.fuzz.media.requests import Part, Prompt
from tests.fuzz.media.sessions import session
from tests.fuzz.rpc_calls import Case
from tests.fuzz.rpcs import Rpc
from tests.fuzz.variants import Variant

PATIENCE = 60.0
_PLACEHOLDERS = (
    "<|image_pad|>",
    "<|video_pad|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|AUDIO|>",
    "<image>",
    "<|im_end|>",
    "<|im_start|>system\n",
)
_TEXTS = ("what is this? ", "a", "\u202e\0", "{{ messages }}", "x" * 200)
_WEIGHTS = {"item": 80.0, "placeholders": 5.0, "too many": 3.0, "mutated": 8.0, "left": 3.0, "killed": 0.3}
_OVER_GRPC = {"session": 4.0, "processed": 3.0}


class Killing(NamedTuple):
    """A request whose decoders are killed.

    ``times`` is the number of kills during decoding. If it is 0, all decoders are killed before the request is sent.
    """

    call: Case | HttpCase
    times: int


Payload = Case | HttpCase | Killing
_Made = tuple[str, Payload] | None
"""Name and payload of an attack; None if the protocol or the model does not support it."""


class MediaAttacks:
    """Makes requests.

    ``rpcs`` has Penstock's and the gateways' RPCs by name, and ``port`` is the hostile host's port.
    """

    def __init__(self, rpcs: Mapping[str, Rpc], port: int) -> None:
        self._rpcs = rpcs
        self._port = port
        self._makers: dict[str, Callable[[Random, Variant, bool], _Made]] = {
            "item": self._item,
            "placeholders": self._placeholders,
            "too many": self._too_many,
            "mutated": self._mutated,
            "left": self._left,
            "killed": self._killed,
            "session": lambda rng, v, _: ("session", session(rng, v, self._rpcs["Session"])),
            "processed": self._processed,
        }

    def make(self, rng: Random, variant: Variant) -> tuple[str, Payload]:
        """Return the name and payload of a request."""
        http = rng.random() < 0.5
        weights = _WEIGHTS if http else _WEIGHTS | _OVER_GRPC
        while True:
            attack = rng.choices(list(weights), list(weights.values()))[0]
            if (made := self._makers[attack](rng, variant, http)) is not None:
                return made

    def _item(self, rng: Random, variant: Variant, http: bool) -> _Made:
        item = items.hostile(rng, variant, self._port)
        parts: list[Part] = [rng.choice(_TEXTS), item, rng.choice(_TEXTS)]
        place = 1
        if rng.random() < 0.2:
            parts.insert(rng.choice((0, len(parts))), items.good(rng, variant))
            place = parts.index(item)
        prompt = Prompt(item.attack, parts, [place], item.reasons, item.taken, self._salt(rng))
        return self._made(prompt, rng, variant, http)

    def _placeholders(self, rng: Random, variant: Variant, http: bool) -> _Made:
        """Return a request whose text looks like media placeholders. The server must treat it as text."""
        texts = ["".join(rng.choices((*_PLACEHOLDERS, " ", "a"), k=rng.choice((1, 5, 40)))) for _ in range(2)]
        parts: list[Part] = [texts[0], items.good(rng, variant), texts[1]] if rng.random() < 0.7 else [*texts]
        return self._made(Prompt("placeholders", parts, [], frozenset(), taken=True), rng, variant, http)

    def _too_many(self, rng: Random, variant: Variant, http: bool) -> _Made:
        count = rng.choice((17, 18, 64, 300))
        parts: list[Part] = [items.good(rng, variant) for _ in range(count)]
        reasons = frozenset({TOO_MANY, INVALID})
        return self._made(Prompt("too many", parts, range(count), reasons, taken=False), rng, variant, http)

    def _killed(self, rng: Random, variant: Variant, http: bool) -> _Made:
        times = rng.choice((0, 1, 1, 2))
        item = items.slow(rng, variant)
        reasons = item.reasons | ({UNREADABLE} if times > 1 else set())
        prompt = Prompt("killed", ["a", item], [1], reasons, item.taken, self._salt(rng))
        made = self._call(prompt, rng, variant, http)
        return None if made is None else (f"killed {times}", Killing(made, times))

    def _left(self, rng: Random, variant: Variant, http: bool) -> _Made:
        """Return a request whose client disconnects while its media are fetched or decoded."""
        item = items.slow(rng, variant) if rng.random() < 0.5 else items.hostile(rng, variant, self._port)
        prompt = Prompt("left", ["a", item], [1], item.reasons, taken=True, salt=self._salt(rng))
        made = self._call(prompt, rng, variant, http)
        if made is None:
            return None
        return f"left {item.attack}", made._replace(cancel=rng.choice((0.0, 0.005, 0.02, 0.1, 0.4)), blame=None)

    def _processed(self, rng: Random, variant: Variant, _http: bool) -> _Made:
        if "image" not in variant.media or variant.pools:
            return None
        message, blame = requests.processed(items.tensors(rng, variant), rng, variant.placeholders["image"])
        return "processed", self._sent("vllm Generate", message, blame)

    def _mutated(self, rng: Random, variant: Variant, http: bool) -> _Made:
        """Return a valid request with random changes."""
        prompt = Prompt("mutated", ["a", items.good(rng, variant), "b"], [1], frozenset(), taken=True)
        made = self._call(prompt, rng, variant, http)
        if isinstance(made, Case):
            sent = mutate.mutated(made.sent[0], made.rpc.request, rng)
            return "mutated", made._replace(sent=[sent], blame=None)
        if isinstance(made, HttpCase):
            body = json_places.changed(json.loads(made.raw.partition(b"\r\n\r\n")[2]), rng)
            return "mutated", _post(made.path, json_places.text(body), None)
        return None

    def _made(self, prompt: Prompt, rng: Random, variant: Variant, http: bool) -> _Made:
        call = self._call(prompt, rng, variant, http)
        return None if call is None else (prompt.attack, call)

    def _call(self, prompt: Prompt, rng: Random, variant: Variant, http: bool) -> Case | HttpCase | None:
        """Return the prompt in one of the protocols, or None if the protocol does not support it."""
        if http:
            return self._over_http(prompt, rng, variant) if requests.can_be_http(prompt) else None
        if variant.pools:
            return self._sent("Embed", *requests.embed(prompt))
        ways = ["Chat", "Generate"]
        sources = [part for part in prompt.parts if isinstance(part, Item)]
        if sources and not any(isinstance(each.source, requests.Features) or each.arguments for each in sources):
            ways.append("vllm Generate")
        match rng.choice(ways):
            case "Chat":
                return self._sent("Chat", *requests.chat(prompt))
            case "Generate":
                return self._sent("Generate", *requests.generate(prompt))
            case way:
                return self._sent(way, *requests.references(prompt, variant.placeholders))

    def _over_http(self, prompt: Prompt, rng: Random, variant: Variant) -> HttpCase | None:
        modalities = {part.modality for part in prompt.parts if isinstance(part, Item)}
        plain = modalities <= {"image"} and not any(isinstance(p, Item) and p.arguments for p in prompt.parts)
        ways = ["/v1/embeddings"] if variant.pools else ["/v1/chat/completions"] * 3 + ["/tokenize"]
        if plain and not variant.pools:
            ways += ["/v1/responses"] * 2 + ["/v1/messages"] * 2
        way = rng.choice(ways)
        if way == "/v1/responses":
            path, body, blame = requests.responses_body(prompt)
        elif way == "/v1/messages":
            path, body, blame = requests.messages_body(prompt, rng)
        else:
            path, body, blame = requests.chat_body(prompt)
            if way != path:
                del body["max_tokens"]
                body.pop("cache_salt", None)
                path = way
            elif rng.random() < 0.2:
                body["stream"] = True
        return _post(path, json.dumps(body), blame)

    def _sent(self, rpc: str, message: Any, blame: Blame) -> Case:
        return Case(self._rpcs[rpc], [message.SerializeToString()], timeout=PATIENCE, blame=blame)

    @staticmethod
    def _salt(rng: Random) -> str:
        return "" if rng.random() < 0.5 else f"s{rng.randrange(3)}"


def _post(path: str, text: str, blame: Blame | None) -> HttpCase:
    raw = request("POST", path, text.encode(errors="surrogatepass"), [])
    return HttpCase(path, raw, timeout=PATIENCE, blame=blame)
