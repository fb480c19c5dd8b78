"""Engines killed under streams with images: ``python -m tests.benchmarks.media_kills``.

The processes are a coordinator, three engines and a frontend. Streams have prompts with an image. Five waves of streams
run, first without faults, then with an engine killed (SIGKILL) once all of them stream. The waves differ in the image
data that the other engines have cached. Token ids are compared with those of the wave without faults.
"""

import argparse
import asyncio
import itertools
import json
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import msgspec

from penstock.common.v1.sampling_pb2 import SamplingParams
from penstock.inference.v1 import messages_pb2 as pb
from tests.benchmarks.peers import machine
from tests.chaos.client import Client
from tests.chaos.killing import address
from tests.chaos.media import forget, image, salted
from tests.chaos.outcome import Outcome, difference
from tests.chaos.requests import Request
from tests.chaos.summary import quantile
from tests.fakes.multimodal_models import save_multimodal_model
from tests.fakes.network.ports import free_port
from tests.fakes.processes import Service
from tests.fakes.systems.cluster import Cluster
from tests.fakes.systems.rank_group import metric

During = Callable[[list[Outcome]], Coroutine[Any, Any, None]]

SHARED = 2
"""Number of common images of the streams, in cases with common images."""
STREAMING = 8
"""Number of tokens that each stream has when the engine is killed."""


class Case(msgspec.Struct, frozen=True):
    """A kind of wave.

    Attributes:
        first: The image comes before all differing parts of the prompts, so that streams have a common prefix.
        own: Each stream has its own image.
        inputs: The caches of processed images are cleared just before the kill.
        embeds: The caches of embeddings are cleared just before the kill.
    """

    name: str
    first: bool = False
    own: bool = False
    inputs: bool = False
    embeds: bool = False


CASES = (
    Case("cached as a prefix", first=True),
    Case("kept and encoded"),
    Case("kept, embeddings forgotten", embeds=True),
    Case("encoded, inputs forgotten", inputs=True),
    Case("an image of each stream's own", own=True),
)


class Killed(msgspec.Struct, frozen=True):
    """Result of a wave with a kill.

    Times are in ms, as median, 99th percentile and maximum: the longest wait for a token of ``moved`` streams, of the
    ``others`` across the kill, and of all streams in the ``undisturbed`` wave.

    Attributes:
        sent: Images sent to engines after the kill.
        again: Requests that were sent twice to one engine.
        embeds: Embeddings computed after the kill.
    """

    case: str
    engine: str
    streams: int
    num_moved: int
    moved: tuple[float, float, float]
    others: tuple[float, float, float]
    undisturbed: tuple[float, float, float]
    sent: int
    again: int
    embeds: int
    failed: int
    differing: int


def requests(case: Case, count: int, tokens: int, salt: str = "") -> list[Request]:
    """Return one request per stream. With ``salt`` each stream has its own images; the answers are the same."""
    found = []
    for number in range(count):
        medium = pb.PromptPart(media=image(number % (count if case.own else SHARED)))
        before = [pb.PromptPart(text=f"Stream {number} of them: ")]
        parts = [medium, *before] if case.first else [*before, medium, pb.PromptPart(text=" What is it?")]
        params = SamplingParams(temperature=1.0, seed=number, max_tokens=tokens, ignore_eos=True, detokenize=False)
        message = pb.GenerateRequest(mixed=pb.MixedPrompt(parts=parts), sampling_params=params)
        request = Request(case.name, "Generate", message)
        found.append(salted(request, f"{salt} {number}") if case.own else request)
    return found


async def wave(cluster: Cluster, load: Sequence[Request], during: During) -> list[Outcome]:
    """Send all requests at once; ``during``, a coroutine function, runs concurrently."""
    outcomes = [Outcome() for _ in load]
    async with Client(*map(address, cluster.frontends)) as client:
        beside = asyncio.create_task(during(outcomes))
        await asyncio.gather(*(client.send(request, into=into) for request, into in zip(load, outcomes, strict=True)))
        await beside
    return outcomes


async def nothing(_: list[Outcome]) -> None:
    """Leave a wave undisturbed."""


def longest(outcome: Outcome) -> float:
    """Return the longest time between two messages."""
    arrivals = outcome.at(0).arrivals
    return max((b - a for a, b in itertools.pairwise(arrivals)), default=0.0)


def three(seconds: Sequence[float]) -> tuple[float, float, float]:
    """Return median, 99th percentile and maximum in ms."""
    values = (quantile(seconds, 0.5), quantile(seconds, 0.99), max(seconds, default=0.0))
    first, second, third = (round(1000 * value, 1) for value in values)
    return first, second, third


def counted(cluster: Cluster, engines: Sequence[Service]) -> dict[str, float]:
    """Return the counters since the start of the services."""
    queries, hits = (metric(cluster.frontend, f"vllm:mm_cache_{what}_total") for what in ("queries", "hits"))
    return {
        "moved": metric(cluster.frontend, "penstock:requests_moved_total"),
        "sent": queries - hits,
        "again": metric(cluster.frontend, "penstock:media_resent_total"),
        "embeds": sum(metric(engine, "penstock:encoder_embeds_total") for engine in engines),
    }


async def with_kill(
    cluster: Cluster, case: Case, number: int, load: Sequence[Request], calm: Sequence[Outcome], admin_port: int
) -> Killed:
    """Run the wave while engine ``number`` is killed. The engine serves again when this function returns."""
    engine = cluster.engines[number]
    rest = [each for each in cluster.engines if each is not engine]
    moment = 0.0
    before: dict[str, float] = {}

    async def kill(outcomes: list[Outcome]) -> None:
        nonlocal moment, before
        while not all(len(outcome.at(0).token_ids) >= STREAMING for outcome in outcomes):
            await asyncio.sleep(0.005)
        if case.inputs or case.embeds:
            await forget(admin_port, inputs=case.inputs, embeds=case.embeds)
        before = await asyncio.to_thread(counted, cluster, rest)
        if any(outcome.at(0).finish for outcome in outcomes):
            raise RuntimeError("a stream has ended before the kill: ask for more tokens")
        await engine.kill()
        moment = time.monotonic()

    got = await wave(cluster, load, kill)
    after = counted(cluster, rest)
    found = {name: round(after[name] - before[name]) for name in after}
    waits = sorted((outcome.at(0).wait_across(moment) for outcome in got), reverse=True)
    wrong = [difference(expected, outcome) for expected, outcome in zip(calm, got, strict=True)]
    await engine.restart()
    await cluster.until_engines_are_seen(len(cluster.engines))
    return Killed(
        case=case.name,
        engine=f"engine-{number}",
        streams=len(load),
        num_moved=found["moved"],
        moved=three(waits[: found["moved"]]),
        others=three(waits[found["moved"] :]),
        undisturbed=three(list(map(longest, calm))),
        sent=found["sent"],
        again=found["again"],
        embeds=found["embeds"],
        failed=sum(bool(each.failed) for each in wrong),
        differing=sum(bool(each) and not each.failed for each in wrong),
    )


async def measure(args: argparse.Namespace, model: Path) -> list[Killed]:
    """Run one kill of each case, with the engines in turn."""
    admin_port = free_port()
    found = []
    async with Cluster(
        model,
        engines=3,
        kv_cache_memory=args.kv_cache,
        frontend_flags={"admin__port": admin_port},
    ) as cluster:
        for number, case in enumerate(case for case in CASES if not args.case or case.name in args.case):
            load = requests(case, args.streams, args.tokens)
            for _ in range(2):  # in the first wave, each engine caches the images
                calm = await wave(cluster, load, nothing)
            if case.own:
                load = requests(case, args.streams, args.tokens, "others")
            killed = await with_kill(cluster, case, number % 3, load, calm, admin_port)
            print(json.dumps(msgspec.to_builtins(killed)), flush=True)
            found.append(killed)
    return found


def table(found: Sequence[Killed]) -> str:
    """Return the table in Markdown."""
    rows = [
        "| image at the other engines | moved | longest wait of these, ms | of the others | undisturbed | images sent | "
        "embeddings computed | failed, differing |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for killed in found:
        times = (killed.moved, killed.others, killed.undisturbed)
        cells = [killed.case, str(killed.num_moved), *(", ".join(f"{value:.0f}" for value in three) for three in times)]
        cells += [str(killed.sent), str(killed.embeds), f"{killed.failed}, {killed.differing}"]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def main() -> int:
    """Print a line of JSON for each kill, then a table. Returns 1 when a stream was harmed."""
    parser = argparse.ArgumentParser(prog="media_kills", description=(__doc__ or "").split("\n\n", 1)[1])
    parser.add_argument("--model", type=Path, help="a checkpoint with a tower for images; a tiny LLaVA by default")
    parser.add_argument("--case", choices=[case.name for case in CASES], action="append", help="by default all")
    parser.add_argument("--streams", type=int, default=32, help="requests at once")
    parser.add_argument("--tokens", type=int, default=1800, help="tokens of each answer")
    parser.add_argument("--kv-cache", default="128MiB", help="of an engine")
    args = parser.parse_args()
    print(json.dumps({"machine": machine(), "model": args.model.name if args.model else "tiny LLaVA"}), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        model = args.model
        if model is None:
            save_multimodal_model("llava", model := Path(folder) / "llava")
        found = asyncio.run(measure(args, model))
    print(table(found))
    return 1 if any(killed.failed or killed.differing for killed in found) else 0


if __name__ == "__main__":
    sys.exit(main())
