"""Adapters in a cluster whose processes start and stop.

The adapters are the demo model's two adapters, and adapters of random numbers.
"""

import asyncio
import contextlib
import itertools
import shutil
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import httpx
import pytest

from examples.demo_model.make_adapters import Options, make_adapters
from penstock.common.v1.sampling_pb2 import SamplingParams
from penstock.inference.v1 import messages_pb2 as pb
from penstock.inference.v1 import service_pb2_grpc as rpc
from penstock_common.rpc.channel import make_channel
from tests.fakes.patience import PATIENCE
from tests.fakes.processes import Service
from tests.fakes.systems.cluster import Cluster, read

DEMO = Path(__file__).resolve().parents[2] / "examples/demo_model"
PROMPTS = ("Once there was a cow", "Anna has a red", "The ship", "In the garden")
TOKENS = 48
STREAMS = 6

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with ``random-0000`` to ``random-0003``, and with the subfolder ``watched``, which has
    ``pirate``.
    """
    folder = tmp_path_factory.mktemp("adapters")
    options = Options(
        model=DEMO / "penstock-tiny",
        out=folder,
        number=4,
        rank=[4, 8],
        modules=["q_proj", "v_proj", "down_proj"],
        name="random",
        strength=1.0,
        dtype="float32",
        seed=0,
    )
    make_adapters(options)
    shutil.copytree(DEMO / "penstock-tiny-pirate", folder / "watched" / "pirate")
    return folder


def cluster_of(adapters: Path, *, engines: int) -> Cluster:
    """Return a cluster with two frontends, which serve ``json`` (configured) and ``pirate`` (from the watched folder)."""
    return Cluster(
        DEMO / "penstock-tiny",
        engines=engines,
        frontends=2,
        frontend_flags={
            "lora__adapters": f'{{"json": "{DEMO / "penstock-tiny-json"}"}}',
            "lora__directory": adapters / "watched",
            "lora__scan_interval": 0.2,
            "lora__roots": f'["{adapters}"]',
            "lora__http_loading": "true",
        },
        lora__max_loras=3,
    )


def random_one(number: int) -> str:
    return f"random-{number:04}"


async def names(frontend: Service) -> set[str]:
    """Return the names of the adapters that a frontend serves."""
    async with httpx.AsyncClient() as http:
        models = (await http.get(f"http://127.0.0.1:{frontend.metrics_port}/v1/models")).json()["data"]
    return {model["id"] for model in models if model.get("parent")}


async def until_all_have(cluster: Cluster, expected: set[str]) -> float:
    """Wait until every frontend serves exactly these names. Returns the seconds that this took."""
    began = time.monotonic()
    async with asyncio.timeout(PATIENCE):
        for frontend in cluster.frontends:
            while await names(frontend) != expected:
                await asyncio.sleep(0.01)
    return time.monotonic() - began


async def load(frontend: Service, adapters: Path, name: str) -> None:
    """Load an adapter from the folder over HTTP, under the name of its subfolder."""
    async with httpx.AsyncClient(timeout=PATIENCE) as http:
        body = {"lora_name": name, "lora_path": str(adapters / name)}
        answer = await http.post(f"http://127.0.0.1:{frontend.metrics_port}/v1/load_lora_adapter", json=body)
    assert answer.status_code == 200, answer.text


class Load:
    """Streams that request adapters from both frontends in turn and compare the tokens with those of an undisturbed
    run.
    """

    def __init__(self, stubs: Sequence["rpc.InferenceServiceAsyncStub"]) -> None:
        self.stubs = stubs
        self.expected: dict[tuple[str, str], list[int]] = {}
        self.num_requests = 0
        self._stopping = False

    async def tokens(self, stub: "rpc.InferenceServiceAsyncStub", lora: str, prompt: str) -> list[int]:
        """Return an adapter's tokens for a prompt."""
        sampling = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
        call = stub.Generate(pb.GenerateRequest(text=prompt, lora=lora, sampling_params=sampling))
        return (await read(call)).token_ids

    async def learn(self, *loras: str) -> None:
        """Record the tokens of an undisturbed run."""
        for lora, prompt in itertools.product(loras, PROMPTS):
            self.expected[lora, prompt] = await self.tokens(self.stubs[0], lora, prompt)

    async def _stream(self, first: int) -> None:
        for number in itertools.count(first, STREAMS):
            if self._stopping:
                return
            known = list(self.expected)
            lora, prompt = known[number * 7 % len(known)]
            got = await self.tokens(self.stubs[number % len(self.stubs)], lora, prompt)
            assert got == self.expected[lora, prompt], f"{lora or 'the model'}, {prompt!r}"
            self.num_requests += 1

    async def more(self, count: int) -> None:
        """Wait until ``count`` more requests have succeeded, or raise the error of the first failed one."""
        target = self.num_requests + count
        async with asyncio.timeout(2 * PATIENCE):
            while self.num_requests < target:
                for task in self._tasks:
                    if task.done():
                        task.result()
                await asyncio.sleep(0.02)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Keep streams running until the block ends. Raises the error that ended one of them."""
        self._tasks = [asyncio.create_task(self._stream(number)) for number in range(STREAMS)]
        try:
            yield
        finally:
            self._stopping = True
            await asyncio.gather(*self._tasks)


@contextlib.asynccontextmanager
async def stubs_of(cluster: Cluster) -> AsyncIterator[list["rpc.InferenceServiceAsyncStub"]]:
    """Yield a stub for each frontend."""
    async with contextlib.AsyncExitStack() as stack:
        channels = [await stack.enter_async_context(make_channel(each.address)) for each in cluster.frontends]
        yield [rpc.InferenceServiceStub(channel) for channel in channels]


async def test_an_adapter_loaded_on_one_frontend_is_served_by_the_other_at_once(adapters: Path) -> None:
    async with cluster_of(adapters, engines=1) as cluster, stubs_of(cluster) as stubs:
        await until_all_have(cluster, {"json", "pirate"})
        seconds = []
        for number in range(4):
            await load(cluster.frontends[0], adapters, random_one(number))
            began = time.monotonic()
            while random_one(number) not in await names(cluster.frontends[1]):
                await asyncio.sleep(0.002)
            seconds.append(time.monotonic() - began)
            assert await Load(stubs).tokens(stubs[1], random_one(number), PROMPTS[0])
        print("served by the other frontend after", ", ".join(f"{each * 1000:.0f} ms" for each in seconds))


async def test_engines_that_join_and_die_and_a_coordinator_that_does_harm_no_request(adapters: Path) -> None:
    cluster = cluster_of(adapters, engines=4)
    joining = [cluster.engines.pop() for _ in range(3)]
    async with contextlib.AsyncExitStack() as stack:
        await stack.enter_async_context(cluster)
        stubs = await stack.enter_async_context(stubs_of(cluster))
        await until_all_have(cluster, {"json", "pirate"})
        for number in range(3):
            await load(cluster.frontends[number % 2], adapters, random_one(number))
        known = {"json", "pirate", *map(random_one, range(3))}
        await until_all_have(cluster, known)
        asking = Load(stubs)
        await asking.learn("", *sorted(known))
        assert len({tuple(tokens) for tokens in asking.expected.values()}) == len(asking.expected)
        async with asking.running():
            for engine in joining:
                await stack.enter_async_context(engine)
                await engine.serving()
                cluster.engines.append(engine)
            await cluster.until_engines_are_seen(4)
            await asking.more(60)
            assert any(stats.lora.num_loads for stats in (await cluster.stats())[1:]), "none that joined has an adapter"
            await cluster.coordinator.kill()
            await load(cluster.frontends[1], adapters, random_one(3))
            await asking.more(20)
            await cluster.coordinator.restart()
            await cluster.until_engines_are_seen(4)
            known.add(random_one(3))
            await until_all_have(cluster, known)
            await asking.more(20)
            await joining[0].kill()
            await asking.more(40)
        print(f"{asking.num_requests} requests, {TOKENS} tokens each, and none harmed")
        await until_all_have(cluster, known)
        for service in cluster.services:
            await service.stop()
        for service in cluster.services:
            await service.start()
        await asyncio.gather(*(service.serving() for service in cluster.services))
        await cluster.until_engines_are_seen(4)
        await until_all_have(cluster, {"json", "pirate"})
