"""Cost of a step of 16 unconstrained requests while constrained requests run in the same batch.

Run ``python -m tests.benchmarks.constrained_neighbours``. A row of the table compares equal work: the same number of
additional requests, with a schema and without, measured in turn in every round. ``--masks`` selects the code that
applies masks: ``torch``, the ``kernels``, or ``both`` in turn in each round. To compare with another version of the
code, run that version with the same arguments on an idle machine.
"""

import argparse
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from penstock_enginecore.native.backend import NativeSampling
from penstock_enginecore.sample.rules import mask_grammar
from tests.benchmarks.make_model import SIZES, make_model
from tests.benchmarks.neighbours import Bench, Row

DEMO = Path(__file__).resolve().parents[2] / "examples/demo_model/penstock-tiny"
COUNTS = (1, 4)


@contextmanager
def masks(by: str) -> Iterator[None]:
    """Apply masks with ``torch`` or with the ``kernels`` while the block runs."""
    method = "mask"  # older versions do not have this setting
    native = getattr(NativeSampling, method, None)
    if by == "torch" and native is not None:
        setattr(NativeSampling, method, lambda _self, logits, grammar: mask_grammar(logits, grammar))
    try:
        yield
    finally:
        if native is not None:
            setattr(NativeSampling, method, native)


def measure(model: Path, threads: int, rounds: int, ways: list[str]) -> Iterator[tuple[str, str, int, float, float]]:
    """Measure all rows.

    Returns the scheduling mode, the mask code, the number of additional requests, and the median milliseconds per step
    without and with a schema.
    """
    for async_scheduling in (False, True):
        bench = Bench(str(model), threads, async_scheduling=async_scheduling)
        found: dict[tuple[str, int, bool], list[float]] = defaultdict(list)
        for number in range(rounds + 1):
            for way in ways:
                for count in COUNTS:
                    for constrained in (False, True):
                        with masks(way):
                            milliseconds = bench.step_ms(Row("", count, constrained=constrained))
                        if number:  # the first round compiles and warms up
                            found[way, count, constrained].append(milliseconds)
        bench.close()
        for way in ways:
            for count in COUNTS:
                free, held = (statistics.median(found[way, count, constrained]) for constrained in (False, True))
                yield "asynchronous" if async_scheduling else "synchronous", way, count, free, held


def main() -> int:
    """Print a table."""
    parser = argparse.ArgumentParser(prog="constrained_neighbours", description=(__doc__ or "").split("\n\n", 1)[1])
    parser.add_argument(
        "--model", type=Path, help="a directory; by default the demo model and then one of 32 000 tokens"
    )
    parser.add_argument("--size", choices=SIZES, default="100M", help="size of the created model")
    parser.add_argument("--masks", choices=("kernels", "torch", "both"), default="both")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    ways = ["torch", "kernels"] if arguments.masks == "both" else [arguments.masks]
    with tempfile.TemporaryDirectory() as made:
        models = [arguments.model]
        if arguments.model is None:
            make_model(Path(made), arguments.size)
            models = [DEMO, Path(made)]
        print("| model | scheduling | masks by | beside 16 | unconstrained ms | with a schema ms | |")
        print("|---|---|---|---|---|---|---|")
        for model in models:
            name = arguments.size if str(model) == made else model.name
            for kind, way, count, free, held in measure(model, arguments.threads, arguments.rounds, ways):
                print(
                    f"| {name} | {kind} | {way} | {count} | {free:.2f} | {held:.2f} | {100 * (held / free - 1):+.0f} % |"
                )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
