"""``python -m tests.fuzz.internal_ports --connections 1000 --streams 56``: foreign connections to the services' own ports.

The exit code is 1 if anything was wrong.
"""

import argparse
import asyncio
import sys

from tests.fuzz.internal_ports import foreign
from tests.fuzz.internal_ports.campaign import HEADER, Limits, Plan, run
from tests.fuzz.internal_ports.systems import KINDS


def main() -> int:
    """See the module."""
    usual = Plan()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--connections", type=int, default=usual.connections, help="to a port at once (%(default)s)")
    parser.add_argument("--streams", type=int, default=usual.streams, help="at once (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=usual.tokens, help="of a stream (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=usual.seconds, help="that connections stay (%(default)s)")
    parser.add_argument("--patience", type=float, default=60.0, help="seconds for a stream (default: %(default)s)")
    parser.add_argument("--system", action="append", choices=KINDS, help="only this one")
    parser.add_argument("--kind", action="append", choices=foreign.KINDS, help="only this one")
    parser.add_argument("--no-forming", action="store_true", help="leave out the connections while systems start")
    given = parser.parse_args()
    plan = Plan(
        connections=given.connections,
        streams=given.streams,
        tokens=given.tokens,
        seconds=given.seconds,
        systems=tuple(given.system or KINDS),
        kinds=tuple(given.kind or foreign.KINDS),
        patience=given.patience,
        forms=not given.no_forming,
    )
    result = asyncio.run(run(plan, Limits(), lambda line: print(line, flush=True)))
    print("", HEADER, *(row.line for row in result.rows), "", f"wrong: {len(result.wrong)}", *result.wrong, sep="\n")
    return 1 if result.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
