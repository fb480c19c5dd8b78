"""``python -m tests.fuzz.connections --connections 20000 --seed 7``: hostile connections beside neighbours.

``--again NUMBER`` makes one connection of a run with the same seed again. The exit code is 1 if anything was wrong.
"""

import argparse
import asyncio
import sys
from pathlib import Path

from tests.fuzz.connections.campaign import ConnectionCampaign, Plan
from tests.fuzz.connections.limits import Limits
from tests.fuzz.connections.report import report
from tests.fuzz.connections.scripts import script_of
from tests.fuzz.findings import Findings


def main() -> int:
    """See the module."""
    limits = Limits()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--connections", type=int, default=20_000, help="hostile connections (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=7, help="seed of all connections (default: %(default)s)")
    parser.add_argument("--at-once", type=int, default=64, help="connections at once (default: %(default)s)")
    parser.add_argument("--hold", type=float, default=3.0, help="longest stay in seconds (default: %(default)s)")
    parser.add_argument(
        "--patience", type=float, default=60.0, help="seconds to wait for answers (default: %(default)s)"
    )
    parser.add_argument(
        "--warm", type=int, default=500, help="connections before memory is noted (default: %(default)s)"
    )
    parser.add_argument("--quiet", type=float, default=10.0, help="seconds undisturbed, twice (default: %(default)s)")
    parser.add_argument("--kind", action="append", default=[], help="send only kinds that begin so")
    parser.add_argument("--protocol", choices=("http", "grpc"), help="send only what this one has (default: both)")
    parser.add_argument("--again", type=int, action="append", default=[], help="send this connection of a run again")
    parser.add_argument("--logs", help="folder for the services' logs")
    given = parser.parse_args()
    findings = Findings()
    plan = Plan(
        count=given.connections,
        seed=given.seed,
        at_once=given.at_once,
        hold=given.hold,
        patience=given.patience,
        warm=given.warm,
        quiet=given.quiet,
        kinds=tuple(given.kind) or ("",),
        protocols=(given.protocol,) if given.protocol else ("http", "grpc"),
        again=tuple(given.again),
    )
    if not any(plan.has(script_of(plan.seed, number, plan.hold)) for number in range(10_000)):
        parser.error(f"--kind is {given.kind}, but no kind of these protocols begins so")
    outcome = asyncio.run(ConnectionCampaign(plan, limits, findings).run())
    if given.logs:
        for service, text in outcome.logs.items():
            Path(given.logs, service).write_text(text)
    print(report(outcome, findings), f"seed {plan.seed}", sep="\n")
    return 1 if findings.wrong() else 0


if __name__ == "__main__":
    sys.exit(main())
