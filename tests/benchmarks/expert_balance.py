"""Balance of expert load over ranks, before and after moving experts: ``python -m
tests.benchmarks.expert_balance``.

The simulation has 8 ranks and 64 experts. Each token selects 4 experts by a Zipf distribution. The order of the experts
in the distribution changes every few windows. The number of slots is 25 percent larger than the number of experts. The
placement for each window uses the counts of the previous window.
"""

import argparse

import numpy as np
from rich.console import Console
from rich.table import Table

from penstock_enginecore.experts.balancer import balance, moves_between, rebalanced
from penstock_enginecore.experts.placement import Placement

RANKS, EXPERTS, TOP, SLOTS = 8, 64, 4, 10


def traffic(seed: int, exponent: float, tokens: int, windows: int, steady: int) -> list[list[int]]:
    """Yield the tokens per expert for each window. The order of the experts changes after ``steady`` windows."""
    random = np.random.default_rng(seed)
    weights = np.log(np.arange(1, EXPERTS + 1) ** -exponent)
    found = []
    for window in range(windows):
        if window % steady == 0:
            order = random.permutation(EXPERTS)
        # The largest of these logarithms with Gumbel noise are a sample without replacement.
        drawn = np.argpartition(-(weights + random.gumbel(size=(tokens, EXPERTS))), TOP, axis=1)[:, :TOP]
        found.append(np.bincount(order[drawn].ravel(), minlength=EXPERTS).tolist())
    return found


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.expert_balance")
    parser.add_argument("--exponent", type=float, default=1.4)
    parser.add_argument("--tokens", type=int, default=4000, help="of a window")
    options = parser.parse_args()
    title = f"{RANKS} ranks, {EXPERTS} experts, {SLOTS} slots each; Zipf {options.exponent}, {options.tokens} tokens a window"
    table = Table(title=title)
    for column in ("window", "as it was", "placed by the window before", "experts moved"):
        table.add_column(column, justify="right")
    even = placement = Placement.even(1, EXPERTS, RANKS, SLOTS)
    for window, counts in enumerate(traffic(0, options.exponent, options.tokens, 12, 4)):
        before = placement
        table.add_row(
            str(window),
            f"{balance(counts, even.physical[0], RANKS):.3f}",
            f"{balance(counts, placement.physical[0], RANKS):.3f}",
            "",
        )
        placement = placement.with_layer(0, rebalanced(counts, placement.physical[0], RANKS))
        table.rows[-1].end_section = (window + 1) % 4 == 0
        moved = len(moves_between(before, placement, 0))
        table.columns[-1]._cells[-1] = str(moved)
    Console().print(table)


if __name__ == "__main__":
    main()
