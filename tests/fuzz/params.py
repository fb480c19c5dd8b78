"""Invalid ``kv_transfer_params`` over HTTP and gRPC: ``python -m tests.fuzz.params [COUNT] [SEED]``.

A frontend must answer each call as an error of the client, or as a request without a source. It must not give its
engine an address that is neither known nor allowed, and other requests must not be affected.
"""

import asyncio
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import grpc
import httpx
from smg_grpc_proto.generated import vllm_engine_pb2 as pb
from smg_grpc_proto.generated import vllm_engine_pb2_grpc as rpc

from penstock.common.v1 import kv_pb2
from penstock_common.observability.logging import configure_library
from penstock_common.rpc.channel import make_channel
from penstock_frontend.config import DisaggregationConfig
from tests.fakes.engines.fake_engine import FakeEngine
from tests.fakes.frontends.openai_server import openai_server
from tests.fakes.models.chat_templates import save_chat_model
from tests.fakes.models.small_tokenizers import byte_level
from tests.fakes.patience import PATIENCE

AT_FAULT = frozenset({"INTERNAL", "UNKNOWN", "UNAVAILABLE", "DATA_LOSS", "UNIMPLEMENTED"})
KNOWN = "127.0.0.1:50054"
AT_ONCE = 16
_SIZES = (16_000, 16_350, 16_384, 16_385, 40_000)
_HOSTS = (
    "127.0.0.1",
    "127.0.0.2",
    "localhost",
    "169.254.169.254",
    "::1",
    "[::1]",
    "0.0.0.0",
    "a" * 300,
    "",
    "h:1",
    "\x00",
)
_PORTS = (50054, 50055, 0, 1, 65_535, 65_536, -1, 2**40, 1.5, "50054", True)
_ODD: tuple[Any, ...] = (
    None,
    True,
    False,
    0,
    1,
    -1,
    2**63,
    10**40,
    1.5,
    "",
    "x",
    "true",
    "\x00",
    "\ud800",
    "é" * 20,
    float("nan"),
    float("inf"),
    [],
    [1],
    {},
    {"a": 1},
    [[[]]],
    {"do_remote_prefill": True},
)


class Wrong(Exception):  # noqa: N818 - what it is
    """Raised if a server violates a rule."""


def params_of(random: Random, foreign: Sequence[str]) -> Any:
    """Return parameters similar to those of an answer. ``foreign`` are addresses that must not be contacted."""
    how = random.random()
    if how < 0.1:
        return random.choice(_ODD)
    own: dict[str, Any] = {
        "incarnation": "1",
        "lease_id": random.randbytes(16).hex(),
        "num_tokens": random.choice((16, 1024)),
        "fingerprint": (b"f" * 16).hex(),
    }
    given: dict[str, Any] = {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": "a",
        "remote_block_ids": [],
        "remote_host": "127.0.0.1",
        "remote_port": 50054,
        "penstock": own,
    }
    if how < 0.2:
        given = {"do_remote_decode": True, "do_remote_prefill": random.choice((False, None, True))}
    if random.random() < 0.5 and foreign:
        host, _, port = random.choice(foreign).rpartition(":")
        given |= {"remote_host": host, "remote_port": int(port)}
    for _ in range(random.choice((0, 0, 1, 1, 2, 4))):
        _change(random, given, own)
    return given


def _change(random: Random, given: dict[str, Any], own: dict[str, Any]) -> None:
    place = own if random.random() < 0.3 else given
    match random.choice(("drop", "odd", "odd", "host", "port", "flag", "more", "long", "deep", "id")):
        case "drop" if place:
            del place[random.choice(list(place))]
        case "odd" if place:
            place[random.choice(list(place))] = random.choice(_ODD)
        case "host":
            given["remote_host"] = random.choice(_HOSTS)
        case "port":
            given["remote_port"] = random.choice(_PORTS)
        case "flag":
            given[random.choice(("do_remote_prefill", "do_remote_decode"))] = random.choice((True, True, False, 1, "x"))
        case "more":
            given[random.choice(("tp_size", "transfer_id", "\x00", "é", "n"))] = random.choice(_ODD)
        case "long":
            given["remote_block_ids"] = "x" * (random.choice(_SIZES) - random.randrange(300))
        case "deep":
            nested: Any = []
            for _ in range(random.choice((5, 100, 600))):
                nested = [nested]
            given["remote_block_ids"] = nested
        case "id":
            own[random.choice(("lease_id", "fingerprint"))] = random.choice(
                ("", "zz", "00" * 15, "00" * 17, "\uff21" * 32)
            )


def text_of(random: Random, params: Any) -> str:
    """Return the parameters as valid or almost valid JSON."""
    text = json.dumps(params)
    how = random.random()
    if how < 0.05:
        return text[: random.randrange(len(text) + 1)]
    if how < 0.08:
        return text + random.choice((" ", "}", ",", "\x00", text))
    if how < 0.1:
        return "[" * random.choice((10, 1000, 16_000))
    return text


class Campaign:
    """Campaign against one frontend.

    Attributes:
        http, channel: Connections to the frontend, which serves ``model``.
        foreign: Addresses that must not be contacted. codes, statuses: Counts of results of the calls.
        neighbours: Number of normal calls, all of them correct.
    """

    def __init__(
        self, http: httpx.AsyncClient, channel: grpc.aio.Channel, model: str, foreign: Sequence[str], seed: int = 0
    ) -> None:
        self._http = http
        self._stub: Any = rpc.VllmEngineStub(channel)
        self._model = model
        self._foreign = foreign
        self._seed = seed
        self.codes: Counter[str] = Counter()
        self.statuses: Counter[int] = Counter()
        self.neighbours = 0

    async def run(self, count: int) -> None:
        """Run the campaign. Raises Wrong."""
        numbers = iter(range(count))
        self._over = False
        expected = await self._neighbour()
        neighbour = asyncio.create_task(self._beside(expected))
        workers = [asyncio.create_task(self._send(numbers)) for _ in range(AT_ONCE)]
        try:
            await asyncio.gather(*workers)
        finally:
            self._over = True
            for worker in workers:
                worker.cancel()
            await neighbour

    async def _send(self, numbers: Any) -> None:
        for number in numbers:
            random = Random(f"{self._seed} {number}")
            try:
                await (self._over_http(random) if number % 2 else self._over_grpc(random))
            except Wrong as e:
                raise Wrong(f"number {number}: {e}") from None

    async def _over_http(self, random: Random) -> None:
        text = text_of(random, params_of(random, self._foreign))
        fields: dict[str, Any] = {"model": self._model, "max_tokens": random.choice((1, 1, 2)), "seed": 1}
        fields |= random.choice(({}, {}, {"n": 2}, {"stream": True}))
        path = random.choice(("/v1/completions", "/v1/completions", "/v1/chat/completions"))
        if path == "/v1/completions":
            fields["prompt"] = random.choice(("hi", "hi", ["a", "b"], [5, 6]))
        else:
            fields["messages"] = [{"role": "user", "content": "hi"}]
        body = f'{json.dumps(fields)[:-1]}, "kv_transfer_params": {text}}}'
        headers = {"content-type": "application/json"}
        answer = await self._http.post(path, content=body.encode(), headers=headers)
        self.statuses[answer.status_code] += 1
        if answer.status_code >= 500 or '"internal_error"' in answer.text:
            raise Wrong(f"{answer.status_code} for {body[:500]}: {answer.text[:500]}")

    async def _over_grpc(self, random: Random) -> None:
        text = text_of(random, params_of(random, self._foreign))
        request = pb.GenerateRequest(
            tokenized=pb.TokenizedInput(original_text="unused", input_ids=(7, 8, 9)),
            sampling_params=pb.SamplingParams(max_tokens=1, seed=1, n=random.choice((1, 1, 2))),
            stream=random.random() < 0.3,
            kv_transfer_params_json=text,
        )
        try:
            async for _ in self._stub.Generate(request, timeout=PATIENCE):
                pass
            code = "OK"
        except grpc.aio.AioRpcError as e:
            code = e.code().name
            if code in AT_FAULT:
                raise Wrong(f"{code} for {text[:500]}: {e.details()}") from None
        self.codes[code] += 1

    async def _neighbour(self) -> str:
        body = {"model": self._model, "prompt": "once upon a time", "max_tokens": 12, "seed": 4}
        answer = await self._http.post("/v1/completions", json=body)
        if answer.status_code != 200:
            raise Wrong(f"a neighbour got {answer.status_code}: {answer.text[:500]}")
        text: str = answer.json()["choices"][0]["text"]
        return text

    async def _beside(self, expected: str) -> None:
        while not self._over:
            if await self._neighbour() != expected:
                raise Wrong("a neighbour got other tokens")
            self.neighbours += 1
            await asyncio.sleep(0.01)


def check_sources(sources: Sequence[kv_pb2.KvSource | None]) -> int:
    """Return the number of sources that an engine was given. Raises Wrong if one is not allowed."""
    asked = [source for source in sources if source is not None]
    if foreign := {source.address for source in asked} - {KNOWN}:
        raise Wrong(f"an engine is to ask at {sorted(foreign)}")
    if any(len(source.lease_id) != 16 or len(source.fingerprint) != 16 for source in asked):
        raise Wrong("a source has ids of another size")
    return len(asked)


async def fuzz(count: int, seed: int) -> tuple[Campaign, int, int]:
    """Run the campaign against a frontend in this process.

    Returns the campaign, and the sources and leases in the engine's requests.
    """
    with tempfile.TemporaryDirectory() as folder:
        model = save_chat_model(Path(folder))
        config = DisaggregationConfig(gateway=True)
        async with FakeEngine("a", vocab_size=byte_level().get_vocab_size()) as engine:
            engine.give_blocks()
            async with openai_server(model, engines=[engine.address], disaggregation=config) as server:
                foreign = (
                    "127.0.0.1:50055",
                    "127.0.0.2:50054",
                    "169.254.169.254:80",
                    "evil.example:50054",
                    "::1:50054",
                )
                async with make_channel(f"127.0.0.1:{server.server.frontend.port}") as channel:
                    campaign = Campaign(server.http, channel, "model", foreign, seed)
                    await campaign.run(count)
                if server.num_live:
                    raise Wrong(f"{server.num_live} requests are left")
            leases = sum(request.lease_kv for request in engine.requests)
            return campaign, check_sources(engine.sources), leases


if __name__ == "__main__":
    configure_library()
    done, num_sources, num_leases = asyncio.run(
        fuzz(int(sys.argv[1]) if len(sys.argv) > 1 else 20_000, int(sys.argv[2]) if len(sys.argv) > 2 else 0)
    )
    print(f"HTTP {dict(done.statuses)}, gRPC {dict(done.codes)}")
    print(f"sources {num_sources}, leases {num_leases}, neighbours {done.neighbours}")
