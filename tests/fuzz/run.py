"""Fuzzes real systems of processes and prints the results: ``python -m tests.fuzz.run --requests 50000 --seed 7``.

The requests are distributed over the variants, which are attacked one after the other. ``--variant`` chooses one
variant. ``--again NUMBER`` repeats one request of a run with the same seed. The exit code is 1 if there were problems.
"""

import argparse
import asyncio
import contextlib
import sys
from pathlib import Path
from typing import NamedTuple

from tests.fuzz.attacks import Attacks
from tests.fuzz.campaign import Campaign, Outcome, Plan
from tests.fuzz.findings import Findings
from tests.fuzz.media.hosts import Hosts
from tests.fuzz.neighbour import Itl
from tests.fuzz.system import Held
from tests.fuzz.variants import SETS, VARIANTS, share_of, turns_of, variant_of

ITL_FACTOR = 2.0


class Options(NamedTuple):
    """Options of a run. ``quiet``: seconds for which the neighbours are measured alone. ``again``: numbers of requests
    to repeat. ``attacks``: the attacks to send, if not all.
    """

    requests: int
    seed: int
    rate: float
    at_once: int
    quiet: float
    schema_examples: int
    variants: tuple[str, ...] = tuple(dict.fromkeys(SETS["all"]))
    again: tuple[int, ...] = ()
    attacks: tuple[str, ...] = ()
    warm: int = 300
    special: bool = True


class Result(NamedTuple):
    """Result of a run. ``outcomes`` has the outcomes by variant."""

    findings: Findings
    outcomes: dict[str, Outcome]

    @property
    def wrong(self) -> list[str]:
        """Return the problems."""
        return self.findings.wrong()


async def fuzz(options: Options, result: Result | None = None) -> Result:
    """Run all campaigns. ``result`` is filled during the run, so an interrupted run has partial results."""
    result = result or Result(Findings(), {})
    turns = turns_of(options.variants[0])
    async with Hosts() as hosts:
        await _in_turn(options, result, Attacks(options.seed, turns, hosts.port), hosts)
    return result


async def _in_turn(options: Options, result: Result, attacks: Attacks, hosts: Hosts) -> None:
    turns = attacks.turns
    chosen = dict.fromkeys(variant_of(number, turns) for number in options.again) or options.variants
    whole = sum(share_of(name, turns) for name in options.variants)
    for name in chosen:
        plan = Plan(
            count=round(options.requests * share_of(name, turns) / whole),
            rate=options.rate,
            at_once=options.at_once,
            quiet=options.quiet,
            schema_examples=0 if options.again or name != options.variants[0] else options.schema_examples,
            seed=options.seed,
            warm=options.warm,
            attacks=options.attacks,
            special=options.special and name == options.variants[0],
        )
        again = tuple(number for number in options.again if variant_of(number, turns) == name)
        campaign = Campaign(VARIANTS[name], plan, attacks, result.findings, again, hosts)
        result.outcomes[name] = await campaign.run()


def report(result: Result) -> str:
    """Return all results as tables."""
    lines = [result.findings.table()]
    for name, outcome in result.outcomes.items():
        muted = f"; attacks found out and no longer sent: {', '.join(outcome.muted)}" if outcome.muted else ""
        lines += ["", f"{name}: {outcome.systems} systems{muted}"]
        lines += ["neighbours' time between tokens    p50 ms   p99 ms   longest    tokens"]
        lines += [
            f"{span:34} {i.p50:8.2f} {i.p99:8.2f} {i.longest:9.1f} {i.count:9}" for span, i in outcome.itl.items()
        ]
        lines += ["held by             RSS MiB         threads     fds         tasks       (before, after), peak MiB"]
        lines += [_held(service, outcome) for service in outcome.before or outcome.peaks]
        lines += ["longest hold of the event loop: computing; by the clock, without what other programs took"]
        for service, (longest, wall, blocks) in outcome.blocks.items():
            lines.append(f"{service:18} {longest} ms, {wall} ms")
            lines += [
                f"    {b['cpu_ms']} ms, {b['wall_ms']} ms ({b['queue_ms']} ms of others): {' < '.join(reversed(b['stack'][-8:]))}"
                for b in blocks[:8]
            ]
    wrong = result.wrong
    return "\n".join([*lines, "", f"wrong: {len(wrong)} kinds", *wrong])


def _held(service: str, outcome: Outcome) -> str:
    before, after = outcome.before.get(service, Held()), outcome.after.get(service, Held())
    pairs = zip((14, 10, 10, 10), before.amounts, after.amounts, strict=True)
    held = "  ".join(f"{f'{old}, {new}':{width}}" for width, old, new in pairs)
    return f"{service:18} {held}  {outcome.peaks.get(service, '-')}"


def slowed(itl: dict[str, Itl]) -> list[str]:
    """Return whether the hostile requests slowed the neighbours down."""
    calm, hit = itl.get("undisturbed"), itl.get("beside hostile requests")
    if calm is None or hit is None or not calm.count or hit.p99 <= ITL_FACTOR * calm.p99:
        return []
    return [
        f"the neighbours' p99 is {hit.p99:.2f} ms; undisturbed it is {calm.p99:.2f} ms, and {ITL_FACTOR:g} times that is allowed"
    ]


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=50_000)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--rate", type=float, default=120.0, help="requests per second")
    parser.add_argument("--at-once", type=int, default=16)
    parser.add_argument(
        "--quiet", type=float, default=16.0, help="seconds that the neighbours are measured alone, each time"
    )
    parser.add_argument("--schema-examples", type=int, default=150, help="of each route, by schemathesis")
    parser.add_argument("--variant", choices=(*SETS, *VARIANTS), default="all", help="which systems")
    parser.add_argument("--attack", action="append", default=[], help="send only those of a run that begin so")
    parser.add_argument("--again", type=int, action="append", default=[], help="send this request of a run again")
    parser.add_argument("--logs", help="folder for the services' logs")
    given = parser.parse_args()
    options = Options(
        requests=given.requests,
        seed=given.seed,
        rate=given.rate,
        at_once=given.at_once,
        quiet=given.quiet,
        schema_examples=given.schema_examples,
        variants=tuple(dict.fromkeys(SETS.get(given.variant, (given.variant,)))),
        again=tuple(given.again),
        attacks=tuple(given.attack),
    )
    result = Result(Findings(), {})
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(fuzz(options, result))
    for name, outcome in result.outcomes.items():
        result.findings.variant = name
        for slow in slowed(outcome.itl):
            result.findings.add("neighbours", slow)
    print(report(result), f"seed {options.seed}", sep="\n")
    if given.logs:
        for name, outcome in result.outcomes.items():
            for service, text in outcome.logs.items():
                Path(given.logs, f"{name}-{service}").write_text(text)
    return 1 if result.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
