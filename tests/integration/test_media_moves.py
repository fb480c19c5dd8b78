"""Requests with media while engines die, reset their caches, or are chosen by media: all tokens are right.

The tokens of the fake engines depend on each byte of a request's media, and on the positions of the media.
"""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from penstock.common.v1 import stats_pb2
from penstock.enginecore.v1 import messages_pb2 as pb
from penstock_common.errors import RequestFailed
from penstock_common.security.tls import Certificates
from penstock_common.tensors.shared_memory import owner_of
from penstock_common.types.media import MultiModalFeature
from penstock_common.types.outputs import EngineCoreOutput, FinishReason, NewTokens
from penstock_common.types.prompt_embeds import PromptEmbeds
from penstock_common.types.request import EngineCoreRequest
from penstock_common.types.sampling import SamplingParams
from penstock_frontend.config import FrontendConfig, ModelConfig, RetriesConfig
from penstock_frontend.dispatch.client import GrpcEngineClient
from penstock_frontend.dispatch.kv_events import KvEventFeed
from tests.fakes.engines.fake_engine import FakeEngine, media_seed, token_at
from tests.fakes.engines.oracle_engine import outputs as oracle
from tests.fakes.engines.oracle_process import OracleProcess
from tests.fakes.patience import PATIENCE
from tests.fakes.systems.media_session import item

LENGTH = 30


class Outputs:
    """OutputHandler of a client. Records the outputs of each request."""

    def __init__(self) -> None:
        self.tokens: dict[str, list[int]] = defaultdict(list)
        self.ends: dict[str, FinishReason | RequestFailed] = {}
        self._changed = asyncio.Event()

    def process(
        self,
        outputs: Sequence[EngineCoreOutput],
        engine: str,
        timestamp: float,
        tokens: Sequence[NewTokens] = (),
        drafts: Sequence[Any] = (),
    ) -> Sequence[str]:
        for request_id, new in tokens:
            self.tokens[request_id] += new
        for output in outputs:
            self.tokens[output.request_id] += output.new_token_ids
            if output.error is not None:
                self.ends[output.request_id] = output.error.to_exception()
            elif output.finish_reason is not None:
                self.ends[output.request_id] = output.finish_reason
        self._changed.set()
        return ()

    def fail(self, request_ids: Iterable[str], error: RequestFailed) -> None:
        for request_id in request_ids:
            self.ends[request_id] = error
        self._changed.set()

    def fail_all(self, error: RequestFailed) -> Sequence[str]:
        return ()

    def moved(self, request_ids: Iterable[str]) -> None:
        pass

    async def until_ended(self, count: int) -> None:
        """Wait until ``count`` requests have ended."""
        await self._until(lambda: len(self.ends) >= count)

    async def until_tokens(self, count: int) -> None:
        """Wait until all requests together have ``count`` tokens."""
        await self._until(lambda: sum(map(len, self.tokens.values())) >= count)

    async def _until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(PATIENCE):
            while not condition():
                self._changed.clear()
                await self._changed.wait()


@asynccontextmanager
async def client_of(*engines: FakeEngine | OracleProcess) -> AsyncIterator[Any]:
    outputs, moves = Outputs(), list[int]()
    config = FrontendConfig(
        model=ModelConfig(path="model", served_model_name="model"),
        engines=tuple(engine.address for engine in engines),
        retries=RetriesConfig(max_strikes=100),  # the test kills engines more often than they finish starting
    )
    client = GrpcEngineClient(
        config,
        incarnation="f",
        outputs=outputs,
        on_change=lambda: None,
        on_moved=moves.append,
        kv_events=KvEventFeed(),
        certificates=Certificates(),
    )
    client.outputs, client.moves = outputs, moves  # type: ignore[attr-defined]
    client.follow(config.engines)
    try:
        await client.wait_until_usable()
        async with asyncio.timeout(PATIENCE):
            while len([c for c in client._pool.connected() if c.ready]) < len(engines):
                await asyncio.sleep(0.01)
        yield client
    finally:
        await client.close()


def asked(request_id: str, *features: MultiModalFeature, seed: int = 0) -> EngineCoreRequest:
    return EngineCoreRequest(
        request_id=request_id,
        prompt_token_ids=[1] * 20,
        sampling_params=SamplingParams(seed=seed, max_tokens=LENGTH),
        mm_features=list(features),
    )


def expected(request: EngineCoreRequest, token: Callable[[int, int], int] = token_at) -> list[int]:
    seed = (request.sampling_params.seed or 0) + media_seed(request.mm_features)
    return [token(seed, index) for index in range(LENGTH)]


def images(*names: str, size: int = 100_000) -> list[MultiModalFeature]:
    return [item(name, size, 24, offset=2 + 3 * place, length=3) for place, name in enumerate(names)]


def make_requests(count: int) -> dict[str, EngineCoreRequest]:
    """Return requests with two images each, most of them shared, and some with text only."""
    requests = [asked(f"r{n}", *images(f"i{n % 5}", f"i{n * 7 % 11}") if n % 4 else (), seed=n) for n in range(count)]
    return {request.request_id: request for request in requests}


def assert_as_expected(
    outputs: Outputs, requests: dict[str, EngineCoreRequest], token: Callable[[int, int], int] = token_at
) -> None:
    for request_id, request in requests.items():
        assert outputs.ends[request_id] is FinishReason.LENGTH, outputs.ends[request_id]
        assert outputs.tokens[request_id] == expected(request, token)


@pytest.fixture
async def engines() -> AsyncIterator[list[FakeEngine]]:
    made = [FakeEngine(name, incarnation=name).serve_media(700_000) for name in "abc"]
    for engine in made:
        engine.eos_token_id = -1
        await engine.start()
    yield made
    for engine in made:
        await engine.kill()


@pytest.mark.parametrize("shared_memory", [False, True])
async def test_requests_outlive_engines_that_are_killed(engines: list[FakeEngine], shared_memory: bool) -> None:
    if shared_memory:
        for engine in engines:
            engine.serve_media(700_000, shared_memory=True)
    async with client_of(*engines) as client:
        requests = make_requests(32)
        client.add(*list(requests.values())[:2])
        for request in list(requests.values())[2:]:
            client.add(request)
        for killed in range(5):
            await client.outputs.until_tokens(100 * (killed + 1))
            # The engine with the most requests, so that no request alone is the suspect twice.
            engine = max(engines, key=lambda engine: len(engine.running))
            port = engine.port
            await engine.kill(grace=0)
            engine.ready.incarnation += "+"
            await engine.start(port)
        await client.outputs.until_ended(len(requests))
        assert_as_expected(client.outputs, requests)
        assert sum(client.moves) > 0
        assert client.media_counts.num_bytes["shared_memory" if shared_memory else "chunks"] > 0


async def test_a_prompt_of_vectors_is_sent_anew_where_its_engine_is_killed() -> None:
    one, other = FakeEngine("a", incarnation="a", manual=True), FakeEngine("b", incarnation="b", manual=True)
    one.ready.max_tensor_bytes = other.ready.max_tensor_bytes = 2**30
    async with one, other, client_of(one, other) as client:
        data = bytes(range(256)) * 1250
        request = msgspec.structs.replace(
            asked("vectors"),
            prompt_token_ids=[0] * 20,
            prompt_embeds=PromptEmbeds(dtype="float32", num_tokens=20, hidden_size=4000, data=data),
        )
        client.add(request)
        await until(lambda: one.requests or other.requests)
        first, second = (one, other) if one.requests else (other, one)
        for _ in range(5):
            first.step()
        await client.outputs.until_tokens(5)
        await first.kill(grace=0)
        await second.until(lambda engine: engine.requests)
        for _ in range(LENGTH):
            second.step()
        await client.outputs.until_ended(1)
        assert_as_expected(client.outputs, {"vectors": request})
        assert client.moves == [1]
        assert b"".join(chunk.data for chunk in second.chunks) == data


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(PATIENCE):
        while not condition():
            await asyncio.sleep(0.01)


async def test_engines_that_forget_media_again_and_again_are_sent_them_again(engines: list[FakeEngine]) -> None:
    async with client_of(*engines) as client:
        requests = make_requests(48)
        for number, request in enumerate(requests.values()):
            client.add(request)
            if number % 4 == 3:
                await asyncio.sleep(0.005)
                results = await client.call_utility("reset_mm_cache")
                assert set(results.values()) == {None}
        await client.outputs.until_ended(len(requests))
        assert_as_expected(client.outputs, requests)
        assert client.moves == []


async def test_an_engine_that_takes_no_media_gets_none() -> None:
    async with FakeEngine("text", incarnation="1") as text, FakeEngine("images", incarnation="2") as seeing:
        seeing.serve_media()
        async with client_of(text) as client:
            client.follow([text.address, seeing.address])
            await seeing.until(lambda e: e.sessions)
            requests = {f"r{n}": asked(f"r{n}", *images("x"), seed=n) for n in range(6)}
            for request in requests.values():
                client.add(request)
            await client.outputs.until_ended(len(requests))
            assert_as_expected(client.outputs, requests)
            assert (len(text.requests), len(seeing.requests)) == (0, 6)
            assert [limit.max_items for limit in client.view.limits.media] == [16]


async def test_a_request_goes_to_the_engine_that_has_its_media(engines: list[FakeEngine]) -> None:
    async with client_of(*engines) as client:
        large = [item("large", 100_000, offset=2, length=600)]
        for number in range(6):
            client.add(asked(f"r{number}", *large, seed=number))
            await client.outputs.until_ended(number + 1)
        assert sorted(len(engine.requests) for engine in engines) == [0, 0, 6]
        counts = client.media_counts
        assert (counts.num_queries, counts.num_hits) == (6, 5)
        assert counts.num_bytes == {"chunks": 100_000}


async def test_embeddings_that_are_to_be_computed_are_load(engines: list[FakeEngine]) -> None:
    async with client_of(*engines) as client:
        for engine in engines[:2]:
            stats = stats_pb2.SchedulerStats(media=stats_pb2.MediaStats(pending_embeds=5000))
            engine.sessions[0].send(outputs=pb.EngineCoreOutputs(scheduler_stats=stats))
        addresses = [engine.address for engine in engines[:2]]
        async with asyncio.timeout(PATIENCE):
            while any(client._dispatch._router.load(address).pending_embeds != 5000 for address in addresses):
                await asyncio.sleep(0.01)
        for number in range(3):
            client.add(asked(f"r{number}", seed=number))
        await client.outputs.until_ended(3)
        assert len(engines[2].requests) == 3


def segments() -> set[str]:
    return {path.name for path in Path("/dev/shm").iterdir() if path.name.startswith(f"penstock-{owner_of('f')}")}


@pytest.mark.slow
async def test_processes_that_are_killed_leave_no_request_and_no_shared_memory() -> None:
    async with AsyncExitStack() as stack:
        made = [OracleProcess(name, receiver_cache_bytes=700_000, step_seconds=0.1) for name in "abc"]
        engines = [await stack.enter_async_context(engine) for engine in made]
        await asyncio.gather(*(engine.serving() for engine in engines))
        client = await stack.enter_async_context(client_of(*engines))
        requests = make_requests(32)
        for request in requests.values():
            client.add(request)
        for killed in range(5):
            await client.outputs.until_tokens(100 * (killed + 1))
            await client.call_utility("reset_mm_cache")
            await engines[killed % 3].restart()
        await client.outputs.until_ended(len(requests))
        assert_as_expected(client.outputs, requests, oracle.token)
        assert sum(client.moves) > 0
        assert client.media_counts.num_bytes["shared_memory"] > 0
    assert segments() == set()
