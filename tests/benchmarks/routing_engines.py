"""Routing of conversations over real engines: ``python -m tests.benchmarks.routing_engines [--model DIR]``.

Three engines and a frontend run on loopback with each policy; one engine with the memory of all three is the reference.
All get the same conversations, several at a time. Each turn is sent after the previous answer. The engines count the
hits. An engine's load is the number of tokens that it computed, prompts and output. No times are reported, because the
engines share the machine's cores.
"""

import argparse
import asyncio
import contextlib
import random
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from penstock_common.observability.logging import configure_library
from penstock_enginecore.config import CacheConfig, EngineCoreConfig, ExecutorConfig, ModelConfig
from penstock_enginecore.core.scheduler.output import SchedulerOutput
from penstock_enginecore.executor.uniproc import UniprocExecutor
from penstock_frontend.config import RoutingConfig, RoutingPolicy
from tests.fakes.engines.engine_server import EngineServer
from tests.fakes.frontends.frontend_server import FrontendServer

MODEL = Path(__file__).parents[2] / "examples/demo_model/penstock-tiny"
BLOCK_SIZE = 16
TURNS = 6
OUTPUT_LEN = 24
VOCAB = 1000
POLICIES: tuple[RoutingPolicy, ...] = ("round_robin", "least_loaded", "prefix_aware")


class Row(NamedTuple):
    """Number of prompt tokens, number of cached prompt tokens, and number of computed tokens of each engine."""

    asked: int
    found: int
    loads: list[int]

    @property
    def hit_rate(self) -> float:
        """Fraction of prompt tokens found in caches."""
        return self.found / self.asked

    @property
    def imbalance(self) -> float:
        """Largest load of an engine relative to the mean load."""
        return max(self.loads) / statistics.mean(self.loads)


class CountingExecutor(UniprocExecutor):
    """Executor that counts its computed tokens."""

    computed = 0

    def execute_model(self, scheduler_output: SchedulerOutput) -> None:
        """See ``Executor``."""
        self.computed += scheduler_output.total_num_scheduled_tokens
        super().execute_model(scheduler_output)


def conversations(count: int, seed: int = 0) -> list[list[list[int]]]:
    """Return the user's side of each conversation, by turn. The first turn has one of four system prompts of 100 to 400
    tokens.
    """
    rng = random.Random(seed)

    def said(low: int, high: int) -> list[int]:
        return [rng.randrange(5, VOCAB) for _ in range(rng.randint(low, high))]

    systems = [said(100, 400) for _ in range(4)]
    made = []
    for _ in range(count):
        questions = [said(10, 60) for _ in range(TURNS)]
        made.append([rng.choices(systems, (8, 4, 2, 1))[0] + questions[0], *questions[1:]])
    return made


@contextlib.contextmanager
def serving(model: Path, count: int, num_blocks: int) -> Iterator[dict[EngineServer, CountingExecutor]]:
    """Run ``count`` engines of ``num_blocks`` blocks each."""
    with contextlib.ExitStack() as stack:
        engines = {}
        for _ in range(count):
            config = EngineCoreConfig(
                model=ModelConfig(path=str(model), served_model_name="model", device="cpu"),
                cache=CacheConfig(block_size=BLOCK_SIZE, num_blocks=num_blocks),
                executor=ExecutorConfig(num_threads=1),
                iteration_log_interval=0.0,
            )
            executor = CountingExecutor(config)
            engine = EngineServer(config, executor).start().load()
            stack.callback(engine.stop)
            engines[engine] = executor
            executor.computed = 0  # discard the count of the warm-up
        yield engines


async def measure(
    model: Path, engines: dict[EngineServer, CountingExecutor], policy: RoutingPolicy, options: argparse.Namespace
) -> Row:
    """Serve all conversations, ``options.at_once`` at a time."""
    waiting = iter(conversations(options.conversations))
    addresses = [engine.address for engine in engines]
    async with FrontendServer(model, engines=addresses, routing=RoutingConfig(policy=policy)) as frontend:
        await frontend.until_engines(len(engines))

        async def talk() -> None:
            for questions in waiting:  # all clients take conversations from the same iterator
                said: list[int] = []
                for question in questions:
                    said += question
                    outputs = await frontend.outputs(
                        token_ids={"ids": said}, temperature=0.0, max_tokens=OUTPUT_LEN, ignore_eos=True
                    )
                    said += [token for output in outputs for token in output.token_ids]

        async with asyncio.TaskGroup() as group:
            for _ in range(options.at_once):
                group.create_task(talk())
    stats = [engine.engine.scheduler.stats() for engine in engines]
    return Row(
        asked=sum(each.prefix_cache_queries for each in stats),
        found=sum(each.prefix_cache_hits for each in stats),
        loads=[executor.computed for executor in engines.values()],
    )


def rows(options: argparse.Namespace) -> Iterator[tuple[str, Row]]:
    """Measure one engine with all the memory, and then the policies."""
    cases: list[tuple[str, RoutingPolicy, int, int]] = [
        ("one engine with all the memory", "least_loaded", 1, options.engines * options.num_blocks),
        *((policy, policy, options.engines, options.num_blocks) for policy in POLICIES),
    ]
    for name, policy, count, num_blocks in cases:
        with serving(options.model, count, num_blocks) as engines:
            yield name, asyncio.run(measure(options.model, engines, policy, options))


def main() -> int:
    """Print the table. Returns 1 when a target is missed."""
    parser = argparse.ArgumentParser(description="Hit rates and evenness by policy, with real engines.")
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--engines", type=int, default=3)
    parser.add_argument("--num-blocks", type=int, default=600, help="of each engine, of 16 tokens")
    parser.add_argument("--conversations", type=int, default=120)
    parser.add_argument("--at-once", type=int, default=18)
    options = parser.parse_args()
    configure_library()
    print("| policy | hit rate | of one engine's | load, max / mean |\n|---|---|---|---|")
    found: dict[str, Row] = {}
    for name, row in rows(options):
        found[name] = row
        highest = next(iter(found.values())).hit_rate
        share = row.hit_rate / highest
        print(f"| {name} | {row.hit_rate:.1%} | {share:.1%} | {row.imbalance:.2f} |", flush=True)
    met = share >= 0.9 and row.imbalance < 1.3
    print("targets met" if met else "TARGETS MISSED: 90% of one engine's hits, load below 1.3")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
