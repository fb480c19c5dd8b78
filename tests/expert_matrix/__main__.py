"""``make expert-matrix``: prints a table of all mixture-of-experts model types over several ranks.

The command fails if tokens are wrong.
"""

import argparse
import sys

from tests.expert_matrix.family import MIXTURES, WAYS, cells


def main() -> int:
    """Print the table and return the number of model types with wrong tokens."""
    parser = argparse.ArgumentParser(prog="python -m tests.expert_matrix")
    parser.add_argument("families", nargs="*", metavar="FAMILY", help="these; all without any")
    names = [f"{dispatch} {size}" for size, dispatch in WAYS]
    print(f"| family | {' | '.join(names)} | refused because |\n" + "|---" * (len(WAYS) + 2) + "|")
    wrong = 0
    for family in parser.parse_args().families or MIXTURES:
        found = cells(family)
        wrong += any(cell.mark == "wrong" for cell in found)
        reasons = dict.fromkeys(cell.why for cell in found if cell.why)
        print(f"| `{family}` | {' | '.join(cell.mark for cell in found)} | {'; '.join(reasons)} |", flush=True)
    return wrong


if __name__ == "__main__":
    sys.exit(main())
