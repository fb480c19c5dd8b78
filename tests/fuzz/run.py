"""``python -m tests.fuzz.run --requests 50000 --seed 7``: fuzz a real system of processes, and say what came of it.

``--again NUMBER`` sends one request of a run with the same seed again. The exit code is 1 when anything was wrong.
"""

import argparse
import asyncio
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

from tests.fuzz.neighbour import Itl, Neighbour, between
from tests.fuzz.openapi import schema_storm
from tests.fuzz.storm import Storm
from tests.fuzz.system import Held, System
from tests.fuzz.tally import Tally

RSS_TOLERANCE, THREADS_TOLERANCE, FDS_TOLERANCE, TASKS_TOLERANCE = 64, 4, 4, 4
"""What a process may hold more than at the start: MiB, and numbers. Pools of threads fill on demand, caches of both kinds."""
ITL_FACTOR = 2.0
_ROUNDS = 8


class Options(NamedTuple):
    """What to do. ``quiet``: seconds that the neighbour is measured alone. ``again``: numbers of requests to send again."""

    requests: int
    seed: int
    rate: float
    at_once: int
    quiet: float
    schema_examples: int
    again: tuple[int, ...] = ()


class Result(NamedTuple):
    """What came of it. ``wrong``: what must not be."""

    tally: Tally
    itl: dict[str, Itl]
    before: dict[str, Held]
    after: dict[str, Held]
    blocks: dict[str, tuple[int, int, list[dict[str, Any]]]]
    wrong: list[str]
    logs: dict[str, str]


async def fuzz(options: Options) -> Result:
    """Run it all."""
    tally, cheap = Tally(), Tally()
    wrong: list[str] = []
    marks: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
    async with (
        System() as system,
        Storm(system, tally, seed=options.seed, rate=options.rate, at_once=options.at_once) as storm,
        Storm(system, cheap, seed=options.seed, rate=options.rate, at_once=options.at_once) as calm,
    ):
        await system.answers()
        if options.again:
            for number in options.again:
                await storm.one(number)
            await system.until_idle()
            return Result(tally, {}, {}, {}, system.blocks(), [*tally.problems(), *system.defects()], system.logs())
        await system.warm_up()
        # What is made once (pools, caches, compilers) is there before anything is counted.
        await storm.hostile(max(300, options.requests // 20))
        await calm.valid(100)
        await system.until_idle()
        await asyncio.sleep(1.5)
        before = system.held()
        async with Neighbour(system.frontend.address) as neighbour:
            await asyncio.sleep(2.0)
            # In turns, so that whatever else the machine does meets all of them alike.
            step, rounds = max(1, (options.requests - tally.count) // _ROUNDS), _ROUNDS
            for _ in range(rounds):
                marks["undisturbed"].append(await _span(asyncio.sleep(options.quiet / rounds)))
                valid = calm.valid(int(options.quiet * options.rate / rounds))
                marks["beside cheap valid requests"].append(await _span(valid))
                marks["beside hostile requests"].append(await _span(storm.hostile(step)))
                print(_progress(tally, options), flush=True)
            await storm.hostile(max(0, options.requests - tally.count))
            marks["beside special cases"].append(await _span(storm.special()))
            gaps, errors = await neighbour.end()
        wrong += [f"the neighbour: {error}" for error in errors[:5]]
        wrong += await schema_storm(system.http_port, tally, examples=options.schema_examples, seed=options.seed)
        await storm.control(max(30, options.requests // 250))
        wrong += [f"left behind: {each}" for each in await system.until_idle()]
        await system.answers()
        await asyncio.sleep(2.5)
        after = system.held()
        itl = {name: between(gaps, spans) for name, spans in marks.items()}
        wrong += tally.problems() + cheap.problems() + system.defects() + _leaks(before, after)
        return Result(tally, itl, before, after, system.blocks(), wrong, system.logs())


def report(result: Result) -> str:
    """Everything in tables."""
    lines = [result.tally.table(), "", "neighbour's time between tokens     p50 ms   p99 ms   longest    tokens"]
    lines += [f"{name:34} {i.p50:8.2f} {i.p99:8.2f} {i.longest:9.1f} {i.count:9}" for name, i in result.itl.items()]
    lines += ["", "held by             RSS MiB         threads     fds         tasks       (before, after)"]
    for name, before in result.before.items():
        after = result.after[name]
        pairs = zip((14, 10, 10, 10), _amounts(before), _amounts(after), strict=True)
        lines.append(f"{name:18} " + "  ".join(f"{f'{old}, {new}':{width}}" for width, old, new in pairs))
    lines += ["", "longest hold of the event loop: computing; by the clock, without what other programs took"]
    for name, (longest, wall, blocks) in result.blocks.items():
        lines.append(f"{name:18} {longest} ms, {wall} ms")
        lines += [
            f"    {b['cpu_ms']} ms, {b['wall_ms']} ms ({b['queue_ms']} ms of others): {' < '.join(reversed(b['stack'][-8:]))}"
            for b in blocks[:25]
        ]
    lines += ["", f"wrong: {len(result.wrong)}", *result.wrong]
    return "\n".join(lines)


async def _span(work: object) -> tuple[float, float]:
    start = time.monotonic()
    await work  # type: ignore[misc]
    return start, time.monotonic()


def _progress(tally: Tally, options: Options) -> str:
    return f"{time.strftime('%H:%M:%S')} {tally.count} of {options.requests}, {tally.num_problems} wrong"


def _amounts(held: Held) -> tuple[int, int, int, int]:
    return held.rss, held.threads, held.fds, held.tasks


def _leaks(before: dict[str, Held], after: dict[str, Held]) -> list[str]:
    found = []
    tolerances = (RSS_TOLERANCE, THREADS_TOLERANCE, FDS_TOLERANCE, TASKS_TOLERANCE)
    for name, old in before.items():
        new = after[name]
        for what, a, b, more in zip(
            ("MiB", "threads", "fds", "tasks"), _amounts(old), _amounts(new), tolerances, strict=True
        ):
            if b > a + more:
                found.append(f"leak: the {name} holds {b} {what}; it was {a}, and {more} more are allowed")
    return found


def slowed(itl: dict[str, Itl]) -> list[str]:
    """Whether the storm slowed the neighbour down."""
    calm, hit = itl["undisturbed"], itl["beside hostile requests"]
    if hit.p99 <= ITL_FACTOR * calm.p99:
        return []
    return [
        f"the neighbour's p99 is {hit.p99:.2f} ms; undisturbed it is {calm.p99:.2f} ms, and {ITL_FACTOR:g} times that is allowed"
    ]


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=50_000)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--rate", type=float, default=120.0, help="requests per second")
    parser.add_argument("--at-once", type=int, default=16)
    parser.add_argument(
        "--quiet", type=float, default=20.0, help="seconds that the neighbour is measured without a storm"
    )
    parser.add_argument("--schema-examples", type=int, default=150, help="of each route, by schemathesis")
    parser.add_argument("--again", type=int, action="append", default=[], help="send this request of a run again")
    parser.add_argument("--logs", help="folder for the services' logs")
    given = parser.parse_args()
    options = Options(
        given.requests, given.seed, given.rate, given.at_once, given.quiet, given.schema_examples, tuple(given.again)
    )
    result = asyncio.run(fuzz(options))
    wrong = [*result.wrong, *(slowed(result.itl) if result.itl else [])]
    print(report(result._replace(wrong=wrong)), f"seed {options.seed}", sep="\n")
    if given.logs:
        for name, text in result.logs.items():
            Path(given.logs, name).write_text(text)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
