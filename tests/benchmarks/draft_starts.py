"""Additional start time of an engine with drafts: ``python -m tests.benchmarks.draft_starts --rounds 5``.

The benchmark measures the time from the start of ``penstock serve`` to the first healthy answer, with and without
drafts in turn. Results are medians.
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

from tests.benchmarks.peers import Server
from tests.benchmarks.speculation import healthy, serve_command
from tests.fakes.network.ports import free_port

MODEL = Path("examples/demo_model/penstock-tiny")
LIMIT = 0.5
"""Maximum seconds that lookup drafters may add to the start."""
_POLL = 0.02


def start(model: Path, flags: list[str], log: Path) -> float:
    """Return the seconds from the start to the first healthy answer."""
    port = free_port()
    server = Server("start", serve_command(model, port, flags), {}, log)
    try:
        return server.wait(lambda: _soon(f"http://127.0.0.1:{port}"))
    finally:
        server.close()


def _soon(url: str) -> bool:
    """Return whether the service reports health within a second."""
    for _ in range(round(1 / _POLL)):
        if healthy(url):
            return True
        time.sleep(_POLL)
    return False


def main() -> int:
    """Print the seconds of each round, and the medians. Returns 1 if drafts add more than ``LIMIT``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=MODEL, help="the checkpoint that is served")
    parser.add_argument("--method", default="ngram")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    folder = Path("build/speculation")
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "start.log"
    flags = {"without": [], args.method: ["--speculative", args.method]}
    start(args.model, flags["without"], log)  # the first start reads files from the disk, so it does not count
    seconds: dict[str, list[float]] = {name: [] for name in flags}
    for number in range(args.rounds):
        for name in flags if number % 2 == 0 else reversed(flags):
            seconds[name].append(round(start(args.model, flags[name], log), 2))
        print(json.dumps({name: found[-1] for name, found in seconds.items()}), flush=True)
    medians = {name: statistics.median(found) for name, found in seconds.items()}
    longer = medians[args.method] - medians["without"]
    print(f"{json.dumps(medians)}: {longer:+.2f} s, {LIMIT} s allowed")
    return int(longer > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
